/** Images and files of text that are attached to a message: chosen, dropped or pasted. */

import { el, iconButton } from "./dom.js";
import { say } from "./status.js";

const LARGEST = 1 << 20; // bytes of a file; larger images are compressed
const MOST = 4 << 20; // bytes of all: a request has its bound, too
const SIDE = 2048; // pixels: images with a longer side are scaled down
const SENT = ["image/png", "image/jpeg", "image/webp", "image/gif"]; // the server reads these
const IMAGE = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+=*$/;

/** @typedef {{name: string, text: string}} Attachment of an image the text is its data URL */

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
   * Attaches those that are texts or images; says what is wrong with the others.
   * @param {Iterable<File> | null} files
   */
  async add(files) {
    for (const file of files ?? []) {
      try {
        const text = await (file.type.startsWith("image/") ? imageOf(file) : textOf(file));
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
    const size = el("small", {}, sizeOf(one.text));
    return el("li", {}, isImage(one) && picture(one), el("span", {}, one.name), size, remove);
  }
}

/** @param {Attachment} one */
const isImage = ({ text }) => IMAGE.test(text);

/** @param {Attachment} one */
const picture = ({ name, text }) => el("img", { class: "picture", src: text, alt: name });

/**
 * Shows attached images, and files folded.
 * @param {Attachment[]} files
 */
export const cards = (files) =>
  files.map((one) =>
    isImage(one)
      ? picture(one)
      : el(
          "details",
          { class: "card file" },
          el("summary", {}, el("span", {}, one.name), el("small", {}, sizeOf(one.text))),
          el("pre", { tabindex: 0 }, one.text),
        ),
  );

/**
 * A message with its files, as the model reads it: a text, or parts if there are images.
 * @param {string} content
 * @param {Attachment[]} files
 */
export function withFiles(content, files) {
  const images = files.filter(isImage);
  const text = withTexts(
    content,
    files.filter((one) => !isImage(one)),
  );
  if (!images.length) return text;
  const parts = images.map((one) => ({ type: "image_url", image_url: { url: one.text } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

/**
 * @param {string} content
 * @param {Attachment[]} files of text
 */
function withTexts(content, files) {
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

/**
 * An image as a data URL: as it is, or scaled down to a size that can be sent.
 * @param {File} file
 * @returns {Promise<string>}
 */
async function imageOf(file) {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error("is no image that the browser can read");
  });
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size <= LARGEST && SENT.includes(file.type)) return dataUrl(file);
  const [width, height] = [bitmap.width, bitmap.height].map((n) => Math.max(1, Math.round(n * scale)));
  const canvas = el("canvas", { width, height });
  const paint = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  paint.fillStyle = "white"; // below transparent pixels
  paint.fillRect(0, 0, width, height);
  paint.drawImage(bitmap, 0, 0, width, height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

/**
 * @param {File} file
 * @returns {Promise<string>}
 */
const dataUrl = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(new Error("cannot be read"));
    reader.readAsDataURL(file);
  });

/** @param {string} text */
const sizeOf = ({ length }) => (length < 1000 ? `${length} B` : `${(length / 1000).toFixed(1)} kB`);
