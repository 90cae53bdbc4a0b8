"""Describe medsilo's methods for `medsilo list METHOD`: the tensors that each method sends, its cost, and the
situations that suit it.
"""

MODEL, OWN, SHARED = "model", "own model", "shared model"
STATISTICS = "model, running statistics"
SELECTED = "global model, personal model, selector"
# Each method has four texts: tensors that leave a hospital, bytes per round compared with FedAvg, extra computation at
# a site, and suitable situations.
FACTS = {
    "local": ("nothing", "0", "none", "the baseline that federated training has to beat"),
    "fedavg": (MODEL, "1", "none", "the first method to try, if hospitals have similar images"),
    "fedprox": (
        MODEL,
        "1",
        "none; the option `partial` simulates slow hospitals",
        "long local training, or hospitals of different speed",
    ),
    "fedbn": ("model without norms", "0.98", "none", "hospitals with different scanners, stains or intensities"),
    "silobn": (
        "model without batch norm's statistics",
        "0.99",
        "none; a hospital that did not train computes its own batch-norm statistics",
        "the same as FedBN, if hospitals without labels join later",
    ),
    "fedrdn": (
        "channel statistics, model; the statistics are sent once and forwarded to all hospitals",
        "1",
        "one pass over the images for their statistics",
        "one shared model for images that differ in brightness and contrast",
    ),
    "fedper": ("model without the last layer", "0.99", "none", "hospitals with different class frequencies"),
    "fedrep": (
        "model without the last layer",
        "0.99",
        "10 additional passes that train only the last layer",
        "the same as FedPer, if the last layer learns fast",
    ),
    "fedrod": (
        SHARED,
        "1",
        "each batch passes through the feature layers once more, without training",
        "classes that are rare at some hospitals, and a shared model for new hospitals",
    ),
    "fednova": (
        "model and how far its steps reach, running statistics",
        "1",
        "none",
        "hospitals with very different numbers of cases",
    ),
    "fedavgm": (STATISTICS, "1", "none; at the server", "scores that fluctuate between rounds"),
    "fedadam": (
        STATISTICS,
        "1",
        "none; at the server",
        "networks that usually need Adam, also in centralised training",
    ),
    "fedyogi": (STATISTICS, "1", "none; at the server", "the same as FedAdam, if its steps grow too fast"),
    "fedadagrad": (STATISTICS, "1", "none; at the server", "sparse updates"),
    "fedlws": (
        STATISTICS,
        "1",
        "none; at the server",
        "hospitals whose updates differ more in some layers than in others",
    ),
    "fedawa": (STATISTICS, "1", "none; at the server", "hospitals whose updates point in different directions"),
    "scaffold": (
        "model, running statistics, control variate",
        "2",
        "none",
        "many local steps and plain SGD",
    ),
    "feddyn": (STATISTICS, "1", "none", "the same as SCAFFOLD, with half of the network traffic"),
    "moon": (
        MODEL,
        "1",
        "each batch passes through two more networks, without training",
        "classification in which the hospitals' features drift apart",
    ),
    "condistfl": (
        MODEL,
        "1",
        "each batch passes through the received model once more, without training",
        "segmentation in which hospitals annotated different structures",
    ),
    "cyclic": (
        MODEL,
        "FedAvg's bytes divided by the number of hospitals",
        "none; only one hospital trains in each round",
        "models that should not be averaged, or hospitals that train at different times",
    ),
    "feddg-ga": (
        "generalisation gap, model, running statistics",
        "1",
        "two passes without training",
        "one model for hospitals that do not take part in training",
    ),
    "fedce": (
        "model, running statistics, contribution",
        "1",
        "one additional validation",
        "segmentation with small or unusual hospitals",
    ),
    "mr-mtl": (OWN, "1", "none", "differential privacy, because noise affects these personal models less"),
    "fedala": (
        OWN,
        "1",
        "one pass to learn the mixing weights; up to 30 passes in the first round",
        "hospitals that benefit to different degrees from the shared last layers",
    ),
    "fedmap": (
        "contribution, model, running statistics",
        "FedAvg's bytes from a hospital, 130 times as many bytes to a hospital",
        "the prior's gradient, as costly as 130 cases a step; one pass without training",
        "small networks on tabular data of different hospitals",
    ),
    "ditto": (
        SHARED,
        "1",
        "two networks learn",
        "a personal model for each hospital, and protection from a bad shared model",
    ),
    "apfl": (SHARED, "1", "two networks learn", "the same as Ditto, if predictions should mix both models"),
    "per-fedavg": (
        SHARED,
        "1",
        "two gradients per batch; four with the Hessian-free variant",
        "hospitals that adapt the shared model with one gradient step",
    ),
    "pfedme": (SHARED, "1", "K = 5 gradients per batch", "the same as Ditto, with several steps on every batch"),
    "fine-tuning": (
        SHARED,
        "1",
        "its fine-tuning epochs before every validation",
        "the simplest personal model for each hospital; try it before the other methods",
    ),
    "fedbabu": (
        "shared model without the last layer",
        "0.99",
        "5 passes of fine-tuning before every validation",
        "the same as fine-tuning, for hospitals with different class frequencies",
    ),
    "harmofl": (
        "model, amplitude (in one round only); the amplitude is one average spectrum per channel",
        "1",
        "two gradients per batch, one Fourier transform per image",
        "one shared model for hospitals whose stains or scanners differ",
    ),
    "adafed": (
        "feature statistics, model without norms; the statistics are sent once; the server reads the cases that are "
        "declared public",
        "0.98",
        "pre-training at the server, one pass for the feature statistics",
        "groups of similar hospitals",
    ),
    "d-adafed": (
        "feature statistics, model without norms; the same as AdaFed",
        "0.98",
        "the same as AdaFed",
        "the same as AdaFed, with the statistics of one layer only",
    ),
    "f-adafed": (
        "model without norms, feature statistics; the statistics are sent once",
        "0.98",
        "none",
        "the same as AdaFed, without public cases",
    ),
    "fedsm": (
        "global model, personal model, selector, sums over features; at the end, hospitals that agreed receive each "
        "other's personal models",
        "two models and the selector: 5.9 times FedAvg's bytes",
        "two networks learn, and a third one processes each batch without learning",
        "different hospitals, and predictions for patients of other hospitals",
    ),
    "fedsm-extra": (
        f"{SELECTED}; the selector follows in later rounds; hospitals that agreed receive each other's personal models",
        "on average, 2.5 times FedAvg's bytes",
        "in the selector's rounds, each batch passes through all K + 1 models",
        "the same as FedSM; an ablation of the FedSM paper",
    ),
    "fedsm-ensemble": (
        f"{SELECTED}; the same as FedSM-extra",
        "on average, 2.5 times FedAvg's bytes",
        "the same as FedSM-extra",
        "the same as FedSM-extra",
    ),
    "central": ("all data are pooled", "–", "–", "an upper bound for comparison; runs in one process only"),
}
