"""The papers' data sets and networks, and their analyses of finished runs."""

KINDS = {  # of analyses: module and function
    "landscape": ("landscape", "landscapes"),
    "profile": ("landscape", "profiles"),
    "drift": ("drift", "drifts"),
    "tsne": ("features", "maps"),
    "inversion": ("inversion", "inversions"),
    "convergence": ("convergence", "curves"),
    "privacy": ("release", "audits"),
}
