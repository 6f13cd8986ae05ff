/** Theme: dark or light, by the system's preference unless the user chooses. */

import { stored } from "./store.js";

const ORDER = ["auto", "dark", "light"];
const theme = stored("theme", "auto");

function apply() {
  document.documentElement.dataset.theme = theme.value;
}

/**
 * Makes a button cycle through the themes.
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
