"""The page's interactive charts: what they show as JSON, and how, as Vega-Lite specifications."""
