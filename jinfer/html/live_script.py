"""Script of views: a line describes the item under the pointer; arrow keys move the focus.

Without it a view looks the same, and browsers show an element's `title`.
"""

from __future__ import annotations

from jinfer.html.png_image import GAMMA

# Elements with `data-keys` (number of columns, or 0 for a text) have items with titles: Tab reaches
# one item, arrows move on. Elements with `data-heat` are images of matrices.
LIVE = """
for (const view of document.querySelectorAll('.jv:not([data-live])')) {
  view.dataset.live = '';
  const say = (part, text) => {
    const out = (part.closest('section') ?? view).querySelector('output');
    if (out) out.textContent = text;
  };
  for (const group of view.querySelectorAll('[data-keys]')) {
    const items = [...group.querySelectorAll('[title]')], wide = +group.dataset.keys || 0;
    const of = event => event.target.closest('[title]');
    for (const kind of ['mouseover', 'focusin']) group.addEventListener(kind, e => {
      const item = of(e);
      if (item) say(group, item.title);
    });
    group.addEventListener('keydown', e => {
      const at = items.indexOf(of(e)), row = wide ? at - at % wide : 0;
      const step = { ArrowRight: at + 1, ArrowLeft: at - 1,
        ArrowDown: at + (wide || 1), ArrowUp: at - (wide || 1),
        Home: row, End: wide ? row + wide - 1 : items.length - 1 }[e.key];
      if (at < 0 || step === undefined) return;
      e.preventDefault();
      const next = items[step];
      if (!next) return;
      items[at].tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
      next.scrollIntoView({ block: 'nearest', inline: 'nearest' });
    });
  }
  for (const heat of view.querySelectorAll('[data-heat]')) {
    const { rows, columns, scale, unit } = JSON.parse(heat.dataset.heat);
    const cross = heat.querySelector('i'), canvas = document.createElement('canvas');
    const draw = canvas.getContext('2d', { willReadFrequently: true });
    let at = [0, 0], source = '';
    const show = () => {
      const picture = getComputedStyle(heat).backgroundImage;
      const describe = () => {
        const alpha = draw.getImageData(at[1], at[0], 1, 1).data[3] / 255;
        const value = (scale * alpha ** (1 / GAMMA)).toFixed(3);
        say(heat, `${rows[at[0]]}\\n${columns[at[1]]}\\n${value} ${unit}`);
      };
      const wide = heat.clientWidth / columns.length, high = heat.clientHeight / rows.length;
      Object.assign(cross.style, { display: 'block', left: `${at[1] * wide}px`,
        top: `${at[0] * high}px`, width: `${wide}px`, height: `${high}px` });
      if (picture === source) return describe();
      const image = new Image();
      image.onload = () => {
        [canvas.width, canvas.height, source] = [image.width, image.height, picture];
        draw.drawImage(image, 0, 0);
        describe();
      };
      image.src = picture.slice(5, -2);
    };
    const bound = (value, most) => Math.max(0, Math.min(most - 1, value));
    heat.addEventListener('mousemove', e => {
      const box = heat.getBoundingClientRect();
      const y = (e.clientY - box.top) / box.height, x = (e.clientX - box.left) / box.width;
      at = [bound(Math.floor(y * rows.length), rows.length),
        bound(Math.floor(x * columns.length), columns.length)];
      show();
    });
    heat.addEventListener('focus', show);
    heat.addEventListener('keydown', e => {
      const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1],
        ArrowDown: [1, 0], ArrowUp: [-1, 0] }[e.key];
      if (!move) return;
      e.preventDefault();
      at = [bound(at[0] + move[0], rows.length), bound(at[1] + move[1], columns.length)];
      show();
    });
  }
}
""".replace("GAMMA", str(GAMMA))
