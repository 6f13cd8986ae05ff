/** Worker that finds the scopes of code with highlight.js; some texts take it long, so it may be ended. */

import library from "./highlight.min.js";

onmessage = ({ data: { code, language } }) => {
  const known = library.getLanguage(language);
  postMessage(known ? library.highlight(code, { language, ignoreIllegals: true }).value : "");
};
postMessage(""); // it is there
