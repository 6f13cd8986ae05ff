/** API client of the server. Paths are relative, so that a proxy may add a prefix. */

import { events } from "./sse.js";
import { key } from "./store.js";

/**
 * @typedef {object} Model
 * @property {string} id
 * @property {{value: string, failed?: boolean, error?: string}} [status]
 * @property {string[]} [capabilities] known once it was loaded, as are those below
 * @property {number} [max_model_len] tokens of its context
 * @property {{n_params: number, size: number}} [meta]
 * @property {string} [parent] of an adapter
 *
 * @typedef {object} Piece of an answer
 * @property {string} [content]
 * @property {string} [reasoning]
 * @property {CallDelta[]} [calls] of functions
 * @property {string} [reason] finish reason
 * @property {{completion_tokens: number, total_tokens: number}} [usage]
 * @property {{prompt_ms: number, predicted_per_second: number}} [timings]
 *
 * @typedef {{index: number, id?: string, function?: {name?: string, arguments?: string}}} CallDelta
 *
 * @typedef {Record<string, unknown> & {role: string, content: string | object[]}} Turn
 */

/** A failed request, with the server's error message. */
export class Refused extends Error {
  /**
   * @param {string} message
   * @param {number} status HTTP status; 0: the server does not respond
   */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/**
 * @param {string} path
 * @param {RequestInit} [options]
 */
async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key.value) headers.set("authorization", `Bearer ${key.value}`);
  const answer = await fetched(path, { ...options, headers });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw new Refused(told?.error?.message ?? `HTTP ${answer.status}`, answer.status);
}

/**
 * @param {string} path
 * @param {RequestInit} options
 */
async function fetched(path, options) {
  try {
    return await fetch(path, { ...options, cache: "no-store" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Refused("The server does not answer.", 0);
  }
}

/** Whether the server is ready. */
export async function healthy() {
  return (await fetched("health", {})).ok;
}

/** @returns {Promise<Model[]>} */
export async function models() {
  return (await (await request("v1/models")).json()).data;
}

/**
 * Loads or unloads a model; comes back when that is done.
 * @param {"load" | "unload"} action
 * @param {string} model
 */
export async function residency(action, model) {
  const headers = { "content-type": "application/json" };
  await request(`models/${action}`, { method: "POST", headers, body: JSON.stringify({ model }) });
}

/** Has the server look for models that have come or gone. */
export async function lookForModels() {
  await request("models?reload=1");
}

/**
 * The model's default sampling parameters.
 * @param {string} model
 * @returns {Promise<Record<string, unknown>>}
 */
export async function defaults(model) {
  const props = await (await request(`props?model=${encodeURIComponent(model)}`)).json();
  return props.default_generation_settings.params;
}

/**
 * The JSON schemas of a chat request's fields.
 * @returns {Promise<Record<string, any>>}
 */
export async function fields() {
  const described = await (await request("openapi.json")).json();
  const { post } = described.paths["/v1/chat/completions"];
  const name = post.requestBody.content["application/json"].schema.$ref.split("/").pop();
  return described.components.schemas[name].properties;
}

/** The metrics in Prometheus's text format. */
export async function metrics() {
  return (await request("metrics")).text();
}

/**
 * Streams the answer to a conversation.
 * @param {{model?: string, messages: Turn[]}} asked and sampling parameters
 * @param {AbortSignal} signal cancels it, here and on the server
 * @returns {AsyncGenerator<Piece>}
 */
export async function* chat(asked, signal) {
  const body = JSON.stringify({ ...asked, stream: true, stream_options: { include_usage: true } });
  const headers = { "content-type": "application/json" };
  const answer = await request("v1/chat/completions", { method: "POST", headers, body, signal });
  if (!answer.body) return;
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") return;
    const { choices, usage, timings, error } = JSON.parse(data);
    if (error) throw new Refused(error.message, 500);
    const choice = choices?.[0];
    yield {
      content: choice?.delta?.content ?? "",
      reasoning: choice?.delta?.reasoning_content ?? "",
      calls: choice?.delta?.tool_calls ?? [],
      reason: choice?.finish_reason ?? undefined,
      usage: usage ?? undefined,
      timings: timings ?? undefined,
    };
  }
}
