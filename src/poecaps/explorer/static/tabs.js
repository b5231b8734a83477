// The tabs below the sliders.

import { byId } from "./dom.js";

const KEYS = { ArrowLeft: -1, ArrowRight: 1 };

export class Tabs {
  /** `onOpen(view)` is called when a tab is opened. */
  constructor(onOpen) {
    this.onOpen = onOpen;
    this.tabs = [...byId("tabs").children];
    byId("tabs").addEventListener("scroll", showMore, { passive: true });
    new ResizeObserver(showMore).observe(byId("tabs"));
    for (const tab of this.tabs) {
      tab.addEventListener("click", () => {
        this.open(viewOf(tab));
        panelOf(tab).scrollIntoView({ block: "start" });
      });
      tab.addEventListener("keydown", (event) => {
        const shown = this.tabs.filter((each) => !each.hidden);
        const at = { Home: 0, End: shown.length - 1 }[event.key]
          ?? (shown.indexOf(tab) + (KEYS[event.key] ?? NaN) + shown.length) % shown.length;
        if (Number.isNaN(at)) return;
        event.preventDefault();
        shown[at].focus();
        this.open(viewOf(shown[at]));
      });
    }
  }

  /** Hide tabs that a model does not need, or show them again. */
  setHidden(view, isHidden) {
    byId(`${view}-tab`).hidden = isHidden;
    if (isHidden && !byId(`${view}-panel`).hidden) this.open(viewOf(this.tabs[0]));
    showMore();
  }

  open(view) {
    const wanted = byId(`${view}-tab`);
    const opened = wanted && !wanted.hidden ? wanted : this.tabs[0];
    for (const tab of this.tabs) {
      tab.setAttribute("aria-selected", tab === opened);
      tab.tabIndex = tab === opened ? 0 : -1;
      panelOf(tab).hidden = tab !== opened;
    }
    byId("tabs").scrollLeft = opened.offsetLeft - byId("tabs").offsetLeft - 40;
    this.onOpen(viewOf(opened));
  }
}

/** Show at which ends of the bar there are more tabs, to which one can scroll. */
function showMore() {
  const { classList, scrollLeft, scrollWidth, clientWidth } = byId("tabs");
  classList.toggle("more-before", scrollLeft > 8);
  classList.toggle("more-after", scrollLeft + clientWidth < scrollWidth - 8);
}

const viewOf = (tab) => tab.id.replace("-tab", "");
const panelOf = (tab) => byId(tab.getAttribute("aria-controls"));
