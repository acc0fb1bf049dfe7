"""The page of a training run: a local web server that reads the files of a run directory. It
imports no device code and changes no file. `docs/run_page.md` describes the page."""
