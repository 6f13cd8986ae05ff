/** Settings form: system prompt, and every sampling parameter of the server's OpenAPI schema. */

import { el } from "./dom.js";
import { Field } from "./field.js";
import { stored } from "./store.js";

export class Settings {
  /**
   * @param {HTMLElement} place container of the parameters
   * @param {HTMLTextAreaElement} system
   * @param {(count: number) => void} changed called with the number of parameters set
   */
  constructor(place, system, changed) {
    this.place = place;
    this.system = system;
    this.changed = changed;
    this.stored = stored("settings", /** @type {Record<string, string>} */ ({}));
    this.storedSystem = stored("system", "");
    /** @type {Field[]} */
    this.fields = [];
    system.value = this.storedSystem.value;
    system.addEventListener("input", () => this.save());
  }

  /**
   * Makes the form.
   * @param {Record<string, any>} schemas of all fields of a request; those of a group are settings
   */
  describe(schemas) {
    /** @type {Map<string, Field[]>} */
    const groups = new Map();
    for (const [name, schema] of Object.entries(schemas)) {
      const group = schema["x-group"];
      if (!group) continue;
      const field = new Field(name, schema, () => this.save());
      field.text = this.stored.value[name] ?? "";
      groups.set(group, [...(groups.get(group) ?? []), field]);
    }
    this.fields = [...groups.values()].flat();
    const shown = [...groups].map(([group, fields], n) => {
      const open = n === 0 || fields.some((field) => field.text);
      return el(
        "details",
        { open },
        el("summary", {}, group),
        ...fields.map((field) => field.element),
      );
    });
    this.place.replaceChildren(...shown);
    this.tell();
  }

  /** @param {Record<string, unknown>} values the defaults */
  defaults(values) {
    for (const field of this.fields) field.otherwise = values[field.name];
  }

  /** The values set, or null if one is invalid, which is then shown. */
  values() {
    const wrong = this.fields.find((field) => !field.form.input.checkValidity());
    if (wrong) {
      wrong.element.closest("details")?.setAttribute("open", "");
      return null;
    }
    const pairs = this.fields.map((field) => [field.name, field.value]);
    return Object.fromEntries(pairs.filter(([, value]) => value !== undefined));
  }

  reset() {
    for (const field of this.fields) field.text = "";
    this.system.value = "";
    this.save();
  }

  save() {
    const pairs = this.fields.map((field) => [field.name, field.text]);
    this.stored.set(Object.fromEntries(pairs.filter(([, text]) => text)));
    this.storedSystem.set(this.system.value);
    this.tell();
  }

  tell() {
    this.changed(Object.keys(this.stored.value).length + (this.system.value.trim() ? 1 : 0));
  }
}
