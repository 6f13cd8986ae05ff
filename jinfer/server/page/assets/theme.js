/** Dark or light: as the system has it, until a person says otherwise. */

import { kept } from "./store.js";

const ORDER = ["auto", "dark", "light"];
const theme = kept("theme", "auto");

function apply() {
  document.documentElement.dataset.theme = theme.value;
}

/**
 * Has a button go through the themes.
 * @param {HTMLButtonElement} button
 */
export function themeButton(button) {
  const show = () => {
    const label = `Theme: ${theme.value}`;
    button.title = label;
    button.setAttribute("aria-label", label);
    button.querySelector("use")?.setAttribute("href", `#icon-${theme.value}`);
  };
  button.addEventListener("click", () => {
    theme.set(ORDER[(ORDER.indexOf(theme.value) + 1) % ORDER.length]);
    apply();
    show();
  });
  show();
}

apply();
