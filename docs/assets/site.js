// What the theme leaves out: a name for the search, and the keyboard's way into tables that are wider than a phone.
{
  const name = (selector, label) => document.querySelector(selector)?.setAttribute("aria-label", label);
  const reach = () => document.querySelectorAll(".md-typeset__scrollwrap").forEach((each) => {
    each.tabIndex = each.scrollWidth > each.clientWidth ? 0 : -1;
  });
  name('[data-md-component="search"]', "Search");
  new MutationObserver(reach).observe(document.querySelector(".md-content") ?? document.body, { childList: true, subtree: true });
  addEventListener("resize", reach);
  reach();
}
