"""Names that a markup, a spreadsheet, a shell or a script would read as more than a name."""

NAMES = (
    "_$5_$", "$\\frac{$", "$10-$20", "[bold]x[/bold]", "[/]", ":smile:", "=1+1", "'=1",
    "-1+2", "@SUM(A1)", "--help", "a|b", "a&b_c%#{}~^\\", "datum['x']", "a.b[0]", "\"'",
    "<script>alert(1)</script>", "<img src=x onerror=a()>", "&lt;", "../x", "__proto__",
    "constructor", "NaN", "null", "007", "1e5", "[a](http://b)", "*b* `c`", "$(id) `id`; #",
    "{{ x }}", "n" * 200, "👩\u200d👧", "😀", "مستشفى", "e\u0301\u0323",
)  # fmt: skip
LABELS = tuple(  # those that can name a folder, as a method's label does
    name for name in NAMES if "/" not in name and name.isprintable()
)
