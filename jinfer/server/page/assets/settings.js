/** Settings form: system prompt, tools, and every sampling parameter of the server's OpenAPI schema. */

import { el } from "./dom.js";
import { Field } from "./field.js";
import { stored } from "./store.js";
import { toolsOf } from "./tools.js";

export class Settings {
  /**
   * @param {HTMLElement} place container of the parameters
   * @param {HTMLTextAreaElement} system
   * @param {HTMLTextAreaElement} tools a list of functions as JSON
   * @param {(count: number) => void} changed called with the number of parameters set
   */
  constructor(place, system, tools, changed) {
    this.place = place;
    this.system = system;
    this.tools = tools;
    this.changed = changed;
    this.stored = stored("settings", /** @type {Record<string, string>} */ ({}));
    this.storedSystem = stored("system", "");
    this.storedTools = stored("tools", "");
    /** @type {Field[]} */
    this.fields = [];
    system.value = this.storedSystem.value;
    system.addEventListener("input", () => this.save());
    tools.value = this.storedTools.value;
    tools.addEventListener("input", () => {
      this.checkTools();
      this.save();
    });
    this.checkTools();
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

  checkTools() {
    this.tools.setCustomValidity("");
    try {
      toolsOf(this.tools.value);
    } catch (error) {
      this.tools.setCustomValidity(/** @type {Error} */ (error).message);
    }
  }

  /** The values set, or null if one is invalid, which is then shown. */
  values() {
    if (!this.tools.checkValidity()) return null;
    const wrong = this.fields.find((field) => !field.form.input.checkValidity());
    if (wrong) {
      wrong.element.closest("details")?.setAttribute("open", "");
      return null;
    }
    const pairs = this.fields.map((field) => [field.name, field.value]);
    pairs.push(["tools", toolsOf(this.tools.value)]);
    return Object.fromEntries(pairs.filter(([, value]) => value !== undefined));
  }

  reset() {
    for (const field of this.fields) field.text = "";
    this.system.value = this.tools.value = "";
    this.checkTools();
    this.save();
  }

  save() {
    const pairs = this.fields.map((field) => [field.name, field.text]);
    this.stored.set(Object.fromEntries(pairs.filter(([, text]) => text)));
    this.storedSystem.set(this.system.value);
    this.storedTools.set(this.tools.value);
    this.tell();
  }

  tell() {
    const texts = [this.system, this.tools].filter((one) => one.value.trim());
    this.changed(Object.keys(this.stored.value).length + texts.length);
  }
}
