"""How the page looks: on a wide screen and a narrow one, light and dark, and on paper."""

CSS = """
:root { color-scheme: light dark; --back: #ffffff; --card: #f6f7f8; --ink: #1a1a1b; --soft: #55585c; --line: #d5d8db;
  --link: #174f8f; --dark: #1f5fa8; --pale: #a9b3bd; --alarm: #b23a1e; --guide: #7f7f80;
  --error: #a3240f; --warning: #7a5200; --info: #174f8f; --good: #1d6b35; }
@media (prefers-color-scheme: dark) { :root { --back: #16181b; --card: #202327; --ink: #e8e9ea; --soft: #a9adb2;
  --line: #3a3f45; --link: #8fbdf2; --dark: #6aa9ee; --pale: #6d7781; --alarm: #f0886c; --guide: #9b9ea2;
  --error: #ff9c86; --warning: #f0c46a; --info: #8fbdf2; --good: #86d69c; } }
@media print { :root { color-scheme: light; --back: #ffffff; --card: #ffffff; --ink: #000000; --soft: #333333;
  --line: #999999; --link: #000000; --dark: #1f5fa8; --pale: #a9b3bd; --alarm: #b23a1e; --guide: #7f7f80;
  --error: #a3240f; --warning: #7a5200; --info: #174f8f; --good: #1d6b35; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--back); color: var(--ink); font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif;
  overflow-wrap: anywhere; }
header, nav, main, footer { max-width: 70rem; margin: 0 auto; padding: 0 1rem; }
header { padding-top: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; border-bottom: 1px solid var(--line); padding-bottom: .25rem; }
h3 { font-size: 1.05rem; margin: 0 0 .5rem; }
h4 { font-size: 1rem; margin: 1rem 0 .25rem; }
p, ul, dl { margin: .5rem 0; }
a { color: var(--link); }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.skip { position: absolute; left: -999rem; }
.skip:focus { left: 1rem; top: .5rem; background: var(--back); padding: .5rem; z-index: 1; }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; }
.verdict { font-size: 1.15rem; font-weight: 600; border-left: .4rem solid var(--good); padding: .5rem .9rem;
  background: var(--card); }
.verdict.error, article.error { border-left-color: var(--error); }
.verdict.warning, article.warning { border-left-color: var(--warning); }
.verdict.info, article.info { border-left-color: var(--info); }
article { border: 1px solid var(--line); border-left: .4rem solid var(--line); background: var(--card);
  padding: 1rem; margin: 1rem 0; }
.label { font-weight: 700; } .error .label { color: var(--error); } .warning .label { color: var(--warning); }
.info .label { color: var(--info); }
.rule, .soft { color: var(--soft); font-size: .95rem; }
dt { font-weight: 600; margin-top: .5rem; } dd { margin: 0 0 .25rem; }
.measures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr));
  gap: 0 2rem; }
.measures div { display: flex; justify-content: space-between; gap: 1rem; border-bottom: 1px dotted var(--line); }
.measures dt { font-weight: 400; margin: 0; } .measures dd { font-variant-numeric: tabular-nums; margin: 0;
  white-space: nowrap; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .9rem; min-width: 50%; }
caption { text-align: left; color: var(--soft); padding: .25rem 0; }
th, td { text-align: left; padding: .2rem .75rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { white-space: nowrap; } td.number, th.number { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
summary { cursor: pointer; padding: .35rem 0; font-weight: 600; }
figure { margin: 2rem 0; } figcaption p { margin: .25rem 0; } figcaption .title { font-weight: 600; }
figure svg { display: block; width: 100%; height: auto; max-width: 60rem; }
figure svg text { font-family: system-ui, "DejaVu Sans", sans-serif !important; }
code { font: .92em ui-monospace, "DejaVu Sans Mono", monospace; }
.assumed { font-style: italic; }
footer { color: var(--soft); padding: 2rem 1rem; }
@media (max-width: 40rem) { body { font-size: 15px; } article { padding: .75rem; }
  .scroll svg { min-width: 34rem; } }
@media print { nav, .skip { display: none; } figure, tr, .measures div { break-inside: avoid; }
  h2, h3, h4, summary { break-after: avoid; } body { font-size: 10.5pt; } a { text-decoration: none; }
  .scroll { overflow: visible; } table { width: 100%; } th { white-space: normal; } td { overflow-wrap: normal; } }
"""
