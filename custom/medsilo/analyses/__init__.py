"""Analyses of finished runs: the papers' figures, each with the numbers that it is drawn from.

Nothing is imported here, so that the command line can name them at once.
"""

KINDS = {  # module and function
    "landscape": ("landscape", "landscapes"),
    "profile": ("landscape", "profiles"),
    "drift": ("drift", "drifts"),
    "tsne": ("features", "maps"),
    "inversion": ("inversion", "inversions"),
    "convergence": ("convergence", "curves"),
}
