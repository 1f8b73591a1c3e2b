"""Colors for light and dark backgrounds, as one stylesheet of CSS custom properties.

Every class and property begins with `pj`, so that pictures fit into any page. The theme is that of the reader's system,
unless an element around the picture has `data-theme="light"` or `data-theme="dark"`, or the attribute of JupyterLab or
VS Code for it.
"""

from collections.abc import Mapping

__all__ = ["COLORS", "PALETTE", "STYLESHEET", "THEMES", "contrast", "ink_on"]

THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {
        "back": "#ffffff",
        "panel": "#f6f8fa",
        "line": "#d1d9e0",
        "muted": "#59636e",
        "ink": "#1f2328",
        "blue": "#2563c9",
        "blue-tint": "#e4eefc",
        "orange": "#b45309",
        "orange-tint": "#fdeed8",
        "teal": "#0b7a6b",
        "teal-tint": "#daf4ee",
        "grey": "#6e7781",
        "grey-tint": "#eceff2",
        "red": "#d1242f",
        "red-tint": "#ffe5e3",
    },
    "dark": {
        "back": "#0d1117",
        "panel": "#161b22",
        "line": "#3d444d",
        "muted": "#9aa4af",
        "ink": "#e6edf3",
        "blue": "#6ea8fe",
        "blue-tint": "#172a4a",
        "orange": "#f0a04b",
        "orange-tint": "#41290d",
        "teal": "#3fc7ae",
        "teal-tint": "#0d352e",
        "grey": "#8b949e",
        "grey-tint": "#262c34",
        "red": "#ff7b72",
        "red-tint": "#4d1a1c",
    },
}
"""Colors by name: `ink` and `muted` are for text, `back` is the background, `panel` that of groups, `line` for lines in
the background; an accent is for outlines and text, its tint for areas below ink."""

# Found by a search for twelve colors that are far apart in OKLab under normal vision, protanopia, deuteranopia and
# tritanopia, and contrast with white and dark backgrounds; the first ones differ most.
PALETTE = (
    "#275ca8",
    "#fd9e3b",
    "#69f0ae",
    "#ab4368",
    "#c0ddfb",
    "#515b29",
    "#e9e123",
    "#d896fa",
    "#3d91a8",
    "#b07946",
    "#8f73e3",
    "#99b297",
)
"""Colors of categories, the same in light and dark. Class `pj-c3` fills with the fourth, `pj-on3` is ink on it."""

COLORS = len(PALETTE)
"""The number of colors of categories."""


_SANS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
_MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


def _brightness(color: str) -> float:
    """The relative luminance of a color, as WCAG 2 defines it."""
    channels = (int(color[k : k + 2], 16) / 255 for k in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """The contrast of two colors, from 1 to 21, as WCAG 2 defines it.

    Example:
        >>> round(contrast("#000000", "#ffffff"), 1)
        21.0
    """
    bright, dark = sorted((_brightness(one), _brightness(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def ink_on(color: str) -> str:
    """Dark or white, whichever is more legible on a color.

    Example:
        >>> ink_on("#ffee00"), ink_on("#000080")
        ('#0d1117', '#ffffff')
    """
    return max(("#0d1117", "#ffffff"), key=lambda ink: contrast(ink, color))


def _stylesheet() -> str:
    def properties(theme: str) -> str:
        return ";".join(f"--pj-{name}:{color}" for name, color in THEMES[theme].items())

    rules = [
        f".pj{{{properties('light')};font-family:{_SANS};max-width:100%;height:auto}}",
        f"@media (prefers-color-scheme:dark){{.pj{{{properties('dark')}}}}}",
        f"[data-theme=light] .pj,[data-jp-theme-light=true] .pj{{{properties('light')}}}",
        f"[data-theme=dark] .pj,[data-jp-theme-light=false] .pj{{{properties('dark')}}}",
        # VS Code's attribute; its dark theme of high contrast has no "dark" in its name.
        f"[data-vscode-theme-kind$=light] .pj{{{properties('light')}}}",
        f"[data-vscode-theme-kind$=dark] .pj,[data-vscode-theme-kind$=contrast] .pj{{{properties('dark')}}}",
        f".pj .pj-mono,.pj-mono{{font-family:{_MONO}}}",
        ".pj-bold{font-weight:600}",
        ".pj-none{fill:none}",
        ".pj-dashed{stroke-dasharray:2 3}",
        # Text over lines.
        *(
            f".pj-clear-{name}{{paint-order:stroke;stroke:var(--pj-{name});stroke-width:4px}}"
            for name in ("back", "panel")
        ),
    ]
    for name in THEMES["light"]:
        rules.append(f".pj-{name}{{fill:var(--pj-{name})}}")
        if not name.endswith("-tint"):
            rules.append(f".pj-s-{name}{{stroke:var(--pj-{name})}}")
    for k, color in enumerate(PALETTE):
        rules.append(f".pj-c{k}{{fill:{color}}}.pj-on{k}{{fill:{ink_on(color)}}}")
    return "".join(rules)


STYLESHEET = _stylesheet()
"""The stylesheet, needed once per picture or page."""
