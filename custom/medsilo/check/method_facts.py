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
        "many local steps in a round, or hospitals whose computers differ in speed",
    ),
    "fedbn": ("model without norms", "0.98", "none", "hospitals with different scanners, stains or intensities"),
    "silobn": (
        "model without batch norm's statistics",
        "0.99",
        "none; a hospital that did not train computes its own batch-norm statistics",
        "hospitals with different scanners or stains, if hospitals without labels join later",
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
        "hospitals with different class frequencies, if the last layer learns fast",
    ),
    "fedrod": (
        SHARED,
        "1",
        "each batch passes through the feature layers once more, without training",
        "classes that are rare at some hospitals, and a shared model for new hospitals",
    ),
    "fednova": (
        "model and effective number of steps, running statistics",
        "1",
        "none",
        "hospitals with very different numbers of cases",
    ),
    "fedavgm": (
        STATISTICS,
        "1",
        "none; the server computes more than with FedAvg",
        "scores that fluctuate between rounds",
    ),
    "fedadam": (
        STATISTICS,
        "1",
        "none; the server computes more than with FedAvg",
        "networks that usually need Adam, also in centralised training",
    ),
    "fedyogi": (
        STATISTICS,
        "1",
        "none; the server computes more than with FedAvg",
        "networks that usually need Adam, if FedAdam's steps grow too fast",
    ),
    "fedadagrad": (STATISTICS, "1", "none; the server computes more than with FedAvg", "sparse updates"),
    "fedlws": (
        STATISTICS,
        "1",
        "none; the server computes more than with FedAvg",
        "hospitals whose updates differ more in some layers than in others",
    ),
    "fedawa": (
        STATISTICS,
        "1",
        "none; the server computes more than with FedAvg",
        "hospitals whose updates point in different directions",
    ),
    "scaffold": (
        "model, running statistics, control variate",
        "2",
        "none",
        "many local steps and plain SGD",
    ),
    "feddyn": (STATISTICS, "1", "none", "many local steps, with half of SCAFFOLD's network traffic"),
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
    "mr-mtl": (OWN, "1", "none", "differential privacy, because noise affects MR-MTL's models less than other models"),
    "fedala": (
        OWN,
        "1",
        "one pass to learn the mixing weights; up to 30 passes in the first round",
        "hospitals that benefit to different degrees from the shared last layers",
    ),
    "fedmap": (
        "contribution, model, running statistics",
        "FedAvg's bytes from a hospital, 130 times FedAvg's bytes to a hospital",
        "the prior's gradient, as costly as 130 cases; one pass without training",
        "small networks on tabular data of different hospitals",
    ),
    "ditto": (
        SHARED,
        "1",
        "two networks learn",
        "a personal model for each hospital, and protection from a bad shared model",
    ),
    "apfl": (
        SHARED,
        "1",
        "two networks learn",
        "a personal model for each hospital, if predictions should mix it with the shared model",
    ),
    "per-fedavg": (
        SHARED,
        "1",
        "two gradients per batch; four with the Hessian-free variant",
        "hospitals that adapt the shared model with one gradient step",
    ),
    "pfedme": (
        SHARED,
        "1",
        "K = 5 gradients per batch",
        "a personal model for each hospital, with several training steps on every batch",
    ),
    "fine-tuning": (
        SHARED,
        "1",
        "the epochs of fine-tuning before every validation",
        "the simplest personal model for each hospital; try fine-tuning before other personal models",
    ),
    "fedbabu": (
        "shared model without the last layer",
        "0.99",
        "5 passes of fine-tuning before every validation",
        "a personal model for each hospital, if class frequencies differ",
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
        "pre-training at the server, and one pass over the data for the feature statistics",
        "groups of similar hospitals",
    ),
    "d-adafed": (
        "feature statistics, model without norms; the server reads public cases, as AdaFed's server does",
        "0.98",
        "pre-training at the server, and one pass over the data for the feature statistics",
        "groups of similar hospitals; d-AdaFed uses the statistics of one layer only",
    ),
    "f-adafed": (
        "model without norms, feature statistics; the statistics are sent once",
        "0.98",
        "none",
        "groups of similar hospitals, if no cases are public",
    ),
    "fedsm": (
        "global model, personal model, selector, sums over features; at the end, hospitals that agreed receive each "
        "other's personal models",
        "two models and the selector: 5.9 times FedAvg's bytes",
        "two networks learn, and a third one processes each batch without learning",
        "hospitals that differ from each other, and predictions for patients of hospitals outside the study",
    ),
    "fedsm-extra": (
        f"{SELECTED}; in later rounds, only the selector; hospitals that agreed receive each other's personal models",
        "on average, 2.5 times FedAvg's bytes",
        "in the selector's rounds, each batch passes through all K + 1 models",
        "hospitals that differ from each other; FedSM-extra is an ablation in the FedSM paper",
    ),
    "fedsm-ensemble": (
        f"{SELECTED}; in the rounds in which FedSM-extra sends these networks",
        "on average, 2.5 times FedAvg's bytes",
        "in the selector's rounds, each batch passes through all K + 1 models",
        "hospitals that differ from each other; FedSM-ensemble is an ablation in the FedSM paper",
    ),
    "central": ("all data are pooled", "–", "–", "an upper bound for comparison; runs in one process only"),
}
