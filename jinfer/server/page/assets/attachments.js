/** Files of text that are attached to a message: chosen, dropped or pasted. */

import { el, iconButton } from "./dom.js";
import { say } from "./status.js";

const LARGEST = 1 << 20; // bytes of a file
const MOST = 4 << 20; // bytes of all: a request has its bound, too

/** @typedef {{name: string, text: string}} Attachment */

export class Attachments {
  /**
   * @param {HTMLElement} list shows what is attached
   * @param {HTMLInputElement} input chooses files
   * @param {HTMLElement} target files are dropped on it
   */
  constructor(list, input, target) {
    this.list = list;
    /** @type {Attachment[]} */
    this.files = [];
    input.addEventListener("change", async () => {
      await this.add(input.files);
      input.value = "";
    });
    target.addEventListener("dragover", (event) => {
      if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
    });
    target.addEventListener("drop", (event) => {
      if (!event.dataTransfer?.files.length) return;
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
    target.addEventListener("paste", (event) => {
      if (!event.clipboardData?.files.length) return;
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
  }

  /**
   * Attaches those that are texts; says what is wrong with the others.
   * @param {Iterable<File> | null} files
   */
  async add(files) {
    for (const file of files ?? []) {
      try {
        const text = await textOf(file);
        const size = [...this.files, { text }].reduce((sum, one) => sum + one.text.length, 0);
        if (size > MOST) throw new Error(`is too much: at most ${MOST >> 20} MiB at a time`);
        this.files.push({ name: file.name, text });
      } catch (error) {
        say(`${file.name} ${/** @type {Error} */ (error).message}`);
      }
    }
    this.show();
  }

  clear() {
    this.files = [];
    this.show();
  }

  show() {
    this.list.replaceChildren(...this.files.map((one) => this.chip(one)));
    this.list.hidden = !this.files.length;
  }

  /** @param {Attachment} one */
  chip(one) {
    const remove = iconButton("close", `Remove ${one.name}`, () => {
      this.files = this.files.filter((other) => other !== one);
      this.show();
    });
    return el("li", {}, el("span", {}, one.name), el("small", {}, sizeOf(one.text)), remove);
  }
}

/**
 * Shows attached files, folded.
 * @param {Attachment[]} files
 */
export const cards = (files) =>
  files.map(({ name, text }) =>
    el(
      "details",
      { class: "card file" },
      el("summary", {}, el("span", {}, name), el("small", {}, sizeOf(text))),
      el("pre", { tabindex: 0 }, text),
    ),
  );

/**
 * A message with its files, as the model reads it.
 * @param {string} content
 * @param {Attachment[]} files
 */
export function withFiles(content, files) {
  const parts = files.map(({ name, text }) => {
    let fence = "```";
    while (text.includes(fence)) fence += "`";
    return `${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}\n\n`;
  });
  return parts.join("") + content;
}

/** @param {File} file */
async function textOf(file) {
  if (file.size > LARGEST) throw new Error(`is larger than ${LARGEST >> 20} MiB`);
  const bytes = await file.arrayBuffer();
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new Error("is no text in UTF-8");
  }
  if (text.includes("\0")) throw new Error("is no text");
  return text.replace(/\r\n?/g, "\n");
}

/** @param {string} text */
const sizeOf = ({ length }) => (length < 1000 ? `${length} B` : `${(length / 1000).toFixed(1)} kB`);
