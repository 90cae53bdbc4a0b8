"""The mathematics of FedSM's super model (Alg. 2): a selector decides for each image whose model answers."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from medsilo.core.errors import MedsiloError
from medsilo.deploy.tuning import check_threshold

GLOBAL = "global"  # the name of the model that all hospitals share
Rule = Literal["threshold", "argmax", "mixture"]


class Experts(nn.Module):
    """One global model, personal models of the hospitals that agreed to share theirs, and the selector f_s.

    `sites` are all hospitals that the selector tells apart, sorted; one that is not in `personal` is represented by
    the global model. Rules:
    - "threshold" (FedSM): the selector has one output per site; an image goes to the most likely site's model when
      its probability is strictly above `threshold`, else to the global model.
    - "argmax" (FedSM-extra): output 0 stands for the global model, 1 and on for the sites; the most likely answers.
    - "mixture" (ensemble): outputs as for "argmax"; all models answer, and their probabilities are mixed.
    """

    def __init__(
        self,
        global_model: nn.Module,
        personal: dict[str, nn.Module],
        selector: nn.Module,
        threshold: float | None = None,
        *,
        sites: Sequence[str] | None = None,
        rule: Rule = "threshold",
    ) -> None:
        super().__init__()
        self.sites = tuple(sorted(personal if sites is None else sites))
        if GLOBAL in self.sites:
            raise MedsiloError(f"a site is named '{GLOBAL}', which is the shared model's name; rename the site")
        if unknown := sorted(personal.keys() - set(self.sites)):
            raise MedsiloError(f"a personal model of '{unknown[0]}', which is none of the sites; name it in `sites`")
        if (rule == "threshold") == (threshold is None):
            raise MedsiloError(f"rule '{rule}' {'needs a' if threshold is None else 'has no'} threshold (gamma)")
        if threshold is not None:
            check_threshold(threshold)
        self.rule, self.threshold = rule, threshold
        self.agreed = tuple(sorted(personal))  # the sites that share their personal models
        self.global_model, self.selector = global_model, selector
        self.personal = nn.ModuleList(personal[site] for site in self.agreed)  # names of sites may hold dots
        # What each output of the selector stands for.
        answering = tuple(site if site in personal else GLOBAL for site in self.sites)
        self.labels = answering if rule == "threshold" else (GLOBAL, *answering)

    def expert(self, name: str) -> nn.Module:
        """The model of that name: "global" or a site that agreed."""
        return self.global_model if name == GLOBAL else self.personal[self.agreed.index(name)]

    def probabilities(self, x: Tensor) -> Tensor:
        """softmax(f_s(x)): [B, outputs], float64."""
        scores = self.selector(x).double()
        if scores.shape[1] != len(self.labels):
            raise MedsiloError(
                f"the selector has {scores.shape[1]} outputs where rule '{self.rule}' of these "
                f"{len(self.sites)} sites needs {len(self.labels)}; use the selector they trained"
            )
        if not scores.isfinite().all():
            raise MedsiloError("the selector's output is NaN or infinite; check the image's values")
        return scores.softmax(1)

    def choose(self, x: Tensor) -> tuple[list[str], Tensor]:
        """Return the site whose model answers for each image, and the selector's greatest probability, [B]."""
        return self.chosen(self.probabilities(x))

    def chosen(self, probabilities: Tensor) -> tuple[list[str], Tensor]:
        """The choice that these probabilities of the selector lead to. Under "mixture": who has the greatest part."""
        confidence, most_likely = probabilities.max(1)
        sure = [True] * len(confidence) if self.threshold is None else (confidence > self.threshold).tolist()
        picks = zip(most_likely.tolist(), sure, strict=True)
        return [self.labels[index] if is_sure else GLOBAL for index, is_sure in picks], confidence

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes, ...]; under "mixture" the logarithm of the mixed probabilities."""
        return self.answer(x)[0]

    def answer(self, x: Tensor) -> tuple[Tensor, list[str], Tensor]:
        """Output, chosen experts and confidence; selector and experts see each image at most once."""
        probabilities = self.probabilities(x)
        names, confidence = self.chosen(probabilities)
        output = self._mixed(x, probabilities) if self.rule == "mixture" else self._routed(x, names)
        return output, names, confidence

    def _routed(self, x: Tensor, names: list[str]) -> Tensor:
        """Each chosen expert runs once, on its images; the outputs go back to their images' places."""
        rows, outputs = [], []
        for name in sorted(set(names)):
            own = torch.tensor([row for row, chosen in enumerate(names) if chosen == name], device=x.device)
            rows.append(own)
            outputs.append(self.expert(name)(x[own]))
        return torch.cat(outputs)[torch.cat(rows).argsort()]

    def _mixed(self, x: Tensor, probabilities: Tensor) -> Tensor:
        """log h, where h = sum_k y_k h_k (Sec. 3.1.1), from logarithms: nothing vanishes, and gradients flow."""
        logarithms = {name: functional.log_softmax(self.expert(name)(x), 1) for name in sorted(set(self.labels))}
        outputs = torch.stack([logarithms[name] for name in self.labels])  # [outputs, B, classes, ...]
        weights = probabilities.log().to(outputs.dtype).T
        return (outputs + weights.reshape(*weights.shape, *(1,) * (outputs.dim() - 2))).logsumexp(0)
