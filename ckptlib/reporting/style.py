"""The style of the page: light or dark, as the reader's system prefers."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f6f4; --card: #ffffff; --text: #1b1b1a; --dim: #63625e; --rule: #e3e2dd; --zero: #a9a8a2;
  --blue: #2a78d6; --sky: #a9cbf2; --green: #1b8f61; --yellow: #d99a00; --violet: #6a55c9; --red: #d5393a;
  --orange: #e0662d; --grey: #b4b3ad; }
@media (prefers-color-scheme: dark) { :root {
  --page: #131312; --card: #1c1c1b; --text: #f1f0ec; --dim: #a3a29b; --rule: #32322f; --zero: #6d6c66;
  --blue: #4b93e8; --sky: #274d7a; --green: #27a876; --yellow: #d29a1c; --violet: #9687ea; --red: #ec6665;
  --orange: #e2743f; --grey: #5e5d58; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 22px; line-height: 1.3; margin: 0; overflow-wrap: anywhere; font-weight: 650; }
h2 { font-size: 16px; margin: 0 0 2px; font-weight: 650; }
p { margin: 4px 0 10px; max-width: 96ch; } p, .dim { color: var(--dim); }
header p { margin: 2px 0 18px; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-bottom: 16px; }
.tile, section { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
.tile { padding: 10px 14px 12px; } .tile b { display: block; font-size: 23px; font-weight: 620; line-height: 1.25; }
.tile span { color: var(--dim); font-size: 13px; display: block; } .bad { color: var(--red); }
section { padding: 16px 18px; margin-bottom: 16px; min-width: 0; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; align-items: stretch; }
@media (max-width: 860px) { .pair { grid-template-columns: 1fr; gap: 0; } }
svg { display: block; width: 100%; height: auto; overflow: visible; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; margin-top: 6px; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--dim); font-weight: 500; white-space: nowrap; } tr:last-child td { border-bottom: 0; }
td { overflow-wrap: anywhere; min-width: 4em; }
td.s { white-space: nowrap; }
.scroll svg { min-width: 640px; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.faded td { color: var(--dim); }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 8px 0 0; padding: 0; font-size: 13px;
  color: var(--dim); }
.key i, td i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
.key i.level-key { display: none; }
summary { cursor: pointer; color: var(--dim); font-size: 14px; } details { margin-top: 8px; }
ul.plain { margin: 6px 0 0; padding-left: 20px; overflow-wrap: anywhere; }
.tick { fill: var(--dim); font-size: 11.5px; } .grid { stroke: var(--rule); } .zero { stroke: var(--zero); }
.border { stroke: var(--zero); stroke-dasharray: 3 3; }
.level { stroke: var(--text); stroke-width: 1.6; } .faded { opacity: .4; } tr.faded { opacity: 1; }
.mark:hover { opacity: .75; }
.line { fill: none; stroke: var(--blue); stroke-width: 2; } .dot { fill: var(--blue); }
.dot.behind { fill: var(--card); stroke: var(--red); stroke-width: 1.5; }
.course { fill: none; stroke: var(--blue); stroke-width: 2; stroke-linejoin: round; }
.course.lost { stroke: var(--red); stroke-dasharray: 4 3; }
.cross { stroke: var(--red); stroke-width: 2.4; fill: none; }
.arrow { stroke: var(--violet); stroke-width: 2; fill: none; }
.c-blue { fill: var(--blue); background: var(--blue); } .c-sky { fill: var(--sky); background: var(--sky); }
.c-green { fill: var(--green); background: var(--green); }
.c-yellow { fill: var(--yellow); background: var(--yellow); }
.c-violet { fill: var(--violet); background: var(--violet); } .c-red { fill: var(--red); background: var(--red); }
.c-orange { fill: var(--orange); background: var(--orange); } .c-grey { fill: var(--grey); background: var(--grey); }
@media print { section, .tile { break-inside: avoid; } }
"""
