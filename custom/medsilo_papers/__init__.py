"""The papers' data sets, networks, tables, and figures from finished runs."""

KINDS = {  # of figures: module and function
    "landscape": ("landscape", "landscapes"),
    "profile": ("landscape", "profiles"),
    "drift": ("drift", "drifts"),
    "tsne": ("features", "maps"),
    "inversion": ("inversion", "inversions"),
    "convergence": ("convergence", "curves"),
}
