/** The messages of a conversation as a tree: answers and edits in place of one another are siblings. */

/**
 * @typedef {object} Call of a function
 * @property {string} id
 * @property {string} name
 * @property {string} arguments as JSON
 *
 * @typedef {object} Message
 * @property {string} id
 * @property {string | null} parent the message before it, which comes earlier in the list
 * @property {"user" | "assistant" | "tool"} role
 * @property {string} content
 * @property {{name: string, text: string}[]} [files] attached to it
 * @property {string} [reasoning] the model's reasoning
 * @property {Call[]} [calls] of functions
 * @property {{id: string, content: string}[]} [results] of a tool message: what the calls returned
 * @property {string} [note] usage, timings and finish reason
 * @property {string} [error] why the answer is incomplete
 * @property {boolean} [cut] whether the answer may be continued
 * @property {number} [used] tokens of the context, up to its end
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} [title] chosen by the user
 * @property {number} updated milliseconds since 1970
 * @property {Message[]} messages of all branches, oldest first
 * @property {string | null} leaf the last message of the branch that is shown
 */

/** @returns {string} an identifier; crypto.randomUUID needs a page from this machine, or HTTPS */
export const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 12)}`;

/** @returns {Conversation} */
export const fresh = () => ({ id: newId(), updated: Date.now(), messages: [], leaf: null });

/**
 * The messages of the branch that ends with a message.
 * @param {Conversation} conversation
 * @param {string | null} [end] the one that is shown if left out
 * @returns {Message[]}
 */
export function branch({ messages, leaf }, end = leaf) {
  const byId = new Map(messages.map((one) => [one.id, one]));
  /** @type {Message[]} */
  const found = [];
  for (let one = byId.get(end ?? ""); one; one = byId.get(one.parent ?? "")) found.push(one);
  return found.reverse();
}

/**
 * The messages in place of which one another stand, oldest first.
 * @param {Conversation} conversation
 * @param {Message} message
 */
export const siblings = ({ messages }, { parent }) =>
  messages.filter((one) => one.parent === parent);

/**
 * Adds a message, and shows its branch.
 * @param {Conversation} conversation
 * @param {string | null} parent
 * @param {Omit<Message, "id" | "parent">} message
 * @returns {Message}
 */
export function add(conversation, parent, message) {
  const added = { id: newId(), parent, ...message };
  conversation.messages.push(added);
  conversation.leaf = added.id;
  return added;
}

/**
 * Shows the branch of a message, to the latest message that follows it.
 * @param {Conversation} conversation
 * @param {Message} message
 */
export function select(conversation, message) {
  /** @type {Message | undefined} */
  let one = message;
  for (; one; one = conversation.messages.findLast(({ parent }) => parent === conversation.leaf))
    conversation.leaf = one.id;
}
