"""The pages: Jinja2 templates, htmx, uPlot and one event stream; no build step."""
