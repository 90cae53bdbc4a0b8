"""Our methods in words: what each sends and costs, and when it is worth a try. `medsilo list METHOD` shows it."""

MODEL, OWN, SHARED = "model", "own model", "shared model"
STATISTICS = "model, running statistics"
SELECTED = "global model, personal model, selector"
# By method: the tensors that leave a hospital, bytes per round relative to FedAvg, extra work at a site, when to try
# it.
FACTS = {
    "local": ("nothing", "0", "none", "what every federation has to beat"),
    "fedavg": (MODEL, "1", "none", "first of all: hospitals whose images are alike"),
    "fedprox": (MODEL, "1", "none; `partial` makes stragglers", "long local training, or hospitals of different speed"),
    "fedbn": ("model without norms", "0.98", "none", "other scanners, stains or intensities at each hospital"),
    "silobn": (
        "model without batch norm's statistics",
        "0.99",
        "none; a hospital that did not train measures its own",
        "as FedBN, with hospitals that join later without labels",
    ),
    "fedrdn": (
        "channel statistics, model; the statistics once, and all hospitals are given them",
        "1",
        "one measuring pass",
        "images that differ in brightness and contrast, and one model for all",
    ),
    "fedper": ("model without the last layer", "0.99", "none", "labels that are shared out differently"),
    "fedrep": (
        "model without the last layer",
        "0.99",
        "10 passes for the head alone",
        "as FedPer, with heads that learn fast",
    ),
    "fedrod": (
        SHARED,
        "1",
        "each batch also passes through the body once more (no training)",
        "classes that some hospitals hardly have, and a shared model for newcomers",
    ),
    "fednova": (
        "model and how far its steps reach, running statistics",
        "1",
        "none",
        "hospitals whose numbers of cases, and so of steps, differ much",
    ),
    "fedavgm": (STATISTICS, "1", "none; at the server", "rounds whose scores swing"),
    "fedadam": (STATISTICS, "1", "none; at the server", "networks that train with Adam at one place, too"),
    "fedyogi": (STATISTICS, "1", "none; at the server", "as FedAdam, where its steps grow too fast"),
    "fedadagrad": (STATISTICS, "1", "none; at the server", "sparse updates"),
    "fedlws": (STATISTICS, "1", "none; at the server", "hospitals that disagree in some layers more than in others"),
    "fedawa": (STATISTICS, "1", "none; at the server", "hospitals whose updates point in different directions"),
    "scaffold": (
        "model, running statistics, control variate",
        "2",
        "none",
        "many local steps and plain SGD",
    ),
    "feddyn": (STATISTICS, "1", "none", "as SCAFFOLD, without its second set of tensors on the line"),
    "moon": (
        MODEL,
        "1",
        "each batch also passes through two extra networks (no training)",
        "classification whose features drift apart",
    ),
    "condistfl": (
        MODEL,
        "1",
        "each batch also passes through the model as it arrived (no training)",
        "segmentation where hospitals drew different structures",
    ),
    "cyclic": (
        MODEL,
        "1 over the hospitals",
        "one hospital trains in a round",
        "no mean is wanted, or one hospital at a time has a machine",
    ),
    "feddg-ga": (
        "generalisation gap, model, running statistics",
        "1",
        "two passes without training",
        "a model for hospitals that did not train",
    ),
    "fedce": (
        "model, running statistics, contribution",
        "1",
        "one more validation",
        "segmentation in which small or odd hospitals should not be lost",
    ),
    "mr-mtl": (OWN, "1", "none", "privacy: little noise is felt by models that only lean on their mean"),
    "fedala": (
        OWN,
        "1",
        "one pass for its weights, up to 30 the first time",
        "hospitals that gain from the last layers of others to different degrees",
    ),
    "fedmap": (
        "contribution, model, running statistics",
        "1 upwards; about 130 downwards, by the prior",
        "the prior's slope in each step, which costs as much as 130 cases; one pass without training",
        "small networks, for tables of hospitals that differ",
    ),
    "ditto": (SHARED, "1", "two networks learn", "a model of each hospital's own, and protection from a bad mean"),
    "apfl": (SHARED, "1", "two networks learn", "as Ditto, where the two are mixed for the answer"),
    "per-fedavg": (
        SHARED,
        "1",
        "two gradients a batch, Hessian-free four",
        "hospitals that adapt the model with one step",
    ),
    "pfedme": (SHARED, "1", "K = 5 gradients a batch", "as Ditto, with a pull on every batch"),
    "fine-tuning": (
        SHARED,
        "1",
        "its epochs before every validation",
        "the simplest model of a hospital's own: try it before the others",
    ),
    "fedbabu": (
        "shared model without the last layer",
        "0.99",
        "5 passes of fine-tuning before every validation",
        "as fine-tuning, where labels are shared out differently",
    ),
    "harmofl": (
        "model, amplitude (in one round only); one average spectrum per channel",
        "1",
        "two gradients a batch, one Fourier transform",
        "stains and scanners whose look differs, and one model for all",
    ),
    "adafed": (
        "feature statistics, model without norms; the statistics once; cases that are declared public, read at "
        "the server",
        "0.98",
        "pre-training at the server, one measuring pass",
        "groups of hospitals that resemble each other",
    ),
    "d-adafed": (
        "feature statistics, model without norms; as AdaFed",
        "0.98",
        "as AdaFed",
        "as AdaFed, by one layer alone",
    ),
    "f-adafed": (
        "model without norms, feature statistics; the statistics once",
        "0.98",
        "none",
        "as AdaFed, without public cases",
    ),
    "fedsm": (
        "global model, personal model, selector, sums over features; at the end the personal model to the other "
        "hospitals, where both agreed",
        "5.9: two models and the selector",
        "two networks learn, and one passes over the batches",
        "hospitals that differ, and patients from elsewhere",
    ),
    "fedsm-extra": (
        f"{SELECTED}; the selector after the models; the personal model to the other hospitals, where both agreed",
        "2.5 on average",
        "all K + 1 models look at each batch in the selector's rounds",
        "as FedSM; its paper's ablation",
    ),
    "fedsm-ensemble": (f"{SELECTED}; as FedSM-extra", "2.5 on average", "as FedSM-extra", "as FedSM-extra"),
    "central": ("all data are pooled", "–", "–", "the upper bound; in one process only"),
}
