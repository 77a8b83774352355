// Draws each description docs/pictures/NAME.d2 as docs/assets/NAME.svg, light and dark in one file. Each drawing holds the
// hash of what it was made from, which tests/docs/test_pictures.py compares.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { D2 } from "@terrastruct/d2";

const pictures = new URL("../../docs/pictures/", import.meta.url);
const read = (name, folder = pictures) => readFileSync(new URL(name, folder), "utf8");
const style = read("style.d2");
const parts = [read("package.json", import.meta.url), read("draw.mjs", import.meta.url), style];
const colors =
  "<style>svg{--lost:#c62828;--good:#1b7f37}@media(prefers-color-scheme:dark){svg{--lost:#ff9d94;--good:#7fd39a}}</style>";
const d2 = new D2();

for (const file of readdirSync(pictures).filter((name) => name.endsWith(".d2") && name !== "style.d2")) {
  const name = file.slice(0, -".d2".length);
  const source = read(file);
  const { title, description } = /^# (?<title>.+)\n(?<description>(?:# .+\n)+)/.exec(source).groups;
  const spoken = description.replaceAll(/^# /gm, "").trim().replaceAll("\n", " ");
  const hash = createHash("sha256").update([...parts, source].join("\n")).digest("hex");
  const { diagram, renderOptions } = await d2.compile({
    fs: { index: source, "style.d2": style },
    options: { layout: "elk", pad: 24, scale: 0.75, themeID: 0, darkThemeID: 200, salt: name, noXMLTag: true },
  });
  const drawing = (await d2.render(diagram, renderOptions))
    .replaceAll("#c62828", "var(--lost)")
    .replaceAll("#1b7f37", "var(--good)")
    .replace("<style", `${colors}<style`);
  const head = `<svg role="img" aria-labelledby="title description" data-source="${hash}"`;
  const labels = `<title id="title">${title}</title><desc id="description">${spoken}</desc>`;
  writeFileSync(
    new URL(`../assets/${name}.svg`, pictures),
    `${drawing.replace("<svg", head).replace(">", () => `>${labels}`).trimEnd()}\n`,
  );
  console.log(`docs/assets/${name}.svg`);
}
process.exit(0); // D2's worker would wait for more.
