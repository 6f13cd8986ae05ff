/** Tabs (ARIA): arrow keys move between tabs, Tab moves to the selected one. */

/**
 * @param {HTMLElement} row with the tabs, each of which controls a panel
 * @param {(id: string) => void} shown called with the visible panel
 */
export function tabs(row, shown) {
  const all = /** @type {HTMLElement[]} */ ([...row.querySelectorAll('[role="tab"]')]);
  /** @param {HTMLElement} tab */
  const panelOf = (tab) => document.getElementById(tab.getAttribute("aria-controls") ?? "");

  // No element's id, or the browser would put the focus there.
  /** @param {HTMLElement} tab */
  const hashOf = (tab) => `#/${panelOf(tab)?.id}`;

  /** @param {HTMLElement} chosen */
  const show = (chosen) => {
    for (const tab of all) {
      const panel = panelOf(tab);
      tab.setAttribute("aria-selected", String(tab === chosen));
      tab.tabIndex = tab === chosen ? 0 : -1;
      if (panel) panel.hidden = tab !== chosen;
    }
    history.replaceState(null, "", hashOf(chosen));
    shown(panelOf(chosen)?.id ?? "");
  };

  for (const tab of all) tab.addEventListener("click", () => show(tab));
  row.addEventListener("keydown", (event) => {
    const at = all.indexOf(/** @type {HTMLElement} */ (document.activeElement));
    const last = all.length - 1;
    const steps = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last };
    const to = steps[/** @type {keyof typeof steps} */ (event.key)];
    if (to === undefined || at < 0) return;
    event.preventDefault();
    const next = all[(to + all.length) % all.length];
    next.focus();
    show(next);
  });
  show(all.find((tab) => hashOf(tab) === location.hash) ?? all[0]);
}
