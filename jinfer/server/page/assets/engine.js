/** Engine metrics as plots, polled once a second while they are visible or an answer comes. */

import { metrics, Refused } from "./api.js";
import { el } from "./dom.js";
import { Plot } from "./plot.js";
import { parse } from "./prometheus.js";

const PERIOD = 1000;
const NAMES = {
  generated: "generation_tokens_total",
  running: "num_requests_running",
  waiting: "num_requests_waiting",
  blocks: "kv_cache_blocks",
  held: "kv_cache_blocks_held",
  looked: "prefix_cache_queries_total",
  hits: "prefix_cache_hits_total",
  drafted: "spec_decode_num_draft_tokens_total",
  accepted: "spec_decode_num_accepted_tokens_total",
};

/** @typedef {Partial<Record<keyof typeof NAMES, number>> & {at: number}} Look at the figures */

export class Engine {
  /**
   * @param {HTMLElement} place
   * @param {() => string} model the model whose metrics are shown
   * @param {(error: Refused) => void} refused
   */
  constructor(place, model, refused) {
    this.model = model;
    this.refused = refused;
    this.wanted = false;
    this.answering = false;
    /** @type {object | null} */
    this.watching = null;
    /** @type {Look | null} */
    this.last = null;
    this.plots = {
      rates: new Plot("Tokens a second", ["generated"], short),
      streams: new Plot("Streams", ["running", "waiting"], short),
      blocks: new Plot("Cache blocks", ["held", "free"], short, undefined, ["free"]),
      prefix: new Plot("Prefix hits", ["of the latest prompts"], percent, 1),
      speculation: new Plot("Speculation", ["of the latest drafts accepted"], percent, 1),
    };
    this.absent = el("p", { class: "absent" });
    const shown = Object.values(this.plots).map((plot) => plot.element);
    place.replaceChildren(...shown, this.absent);
    document.addEventListener("visibilitychange", () => this.begin());
  }

  /** @param {boolean} wanted whether the plots are visible */
  visible(wanted) {
    this.wanted = wanted;
    this.begin();
  }

  /** @param {boolean} answering whether an answer is being streamed here */
  busy(answering) {
    if (this.answering === answering) return;
    this.answering = answering;
    this.begin();
  }

  /** Begins to poll, or ends. */
  begin() {
    const needed = (this.wanted || this.answering) && !document.hidden;
    if (needed === (this.watching !== null)) return;
    this.watching = null;
    this.last = null;
    if (needed) this.watch();
  }

  /** Polls until the plots are hidden or another poll has started. */
  async watch() {
    const watching = (this.watching = {});
    while (watching === this.watching) {
      await this.look();
      await new Promise((resolve) => setTimeout(resolve, PERIOD));
    }
  }

  /** Clears the plots when the model changes. */
  clear() {
    this.last = null;
    for (const plot of Object.values(this.plots)) plot.clear();
  }

  async look() {
    try {
      const model = this.model();
      const now = seen(await metrics(), model);
      if (model === this.model()) this.show(now);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.last = null;
      this.say(error.message);
      if (!error.status) return; // it may come back
      this.watching = null;
      this.refused(error);
    }
  }

  /** @param {Look} now */
  show(now) {
    const { rates, streams, blocks, prefix, speculation } = this.plots;
    const { last } = this;
    this.last = now;
    speculation.element.hidden = !now.drafted;
    if (now.running === undefined) {
      this.say("This model is not in memory, so there is nothing to see of it.");
      return;
    }
    this.say(!now.drafted ? "Nothing is speculated: the server has no figures of drafts." : "");
    const seconds = last ? (now.at - last.at) / 1000 : 0;
    /** @param {keyof typeof NAMES} name */
    const more = (name) => {
      const before = last?.[name];
      const present = now[name];
      return before === undefined || present === undefined || present < before
        ? null
        : present - before;
    };
    const generated = more("generated");
    rates.push([generated === null ? null : generated / seconds]);
    streams.push([now.running ?? null, now.waiting ?? null]);
    const free = now.blocks !== undefined && now.held !== undefined ? now.blocks - now.held : null;
    blocks.most = now.blocks;
    blocks.push([now.held ?? null, free]);
    prefix.push([share(more("hits"), more("looked")) ?? prefix.latest]);
    if (!now.drafted) return;
    speculation.push([share(more("accepted"), more("drafted")) ?? speculation.latest]);
  }

  /** @param {string} text */
  say(text) {
    this.absent.textContent = text;
    this.absent.hidden = !text;
  }
}

/**
 * @param {string} text
 * @param {string} model
 * @returns {Look}
 */
function seen(text, model) {
  const own = parse(text).filter(({ labels }) => labels.model_name === model);
  const values = new Map(own.map(({ name, value }) => [name, value]));
  const pairs = Object.entries(NAMES).map(([key, name]) => [key, values.get(`jinfer:${name}`)]);
  return { at: performance.now(), ...Object.fromEntries(pairs) };
}

/**
 * @param {number | null} part
 * @param {number | null} whole
 */
const share = (part, whole) => (part === null || !whole ? null : part / whole);

/** @param {number} value */
const short = (value) =>
  value >= 10_000
    ? `${Math.round(value / 1000)}k`
    : value % 1 && value < 100
      ? value.toFixed(1)
      : String(Math.round(value));

/** @param {number} value */
const percent = (value) => `${Math.round(value * 100)} %`;
