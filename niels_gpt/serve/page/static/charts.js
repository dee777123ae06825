// Line charts as SVG, for the view Runs.
