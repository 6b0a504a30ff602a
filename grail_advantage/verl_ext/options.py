"""Which method a run's configuration asks for, and with which options. Needs no verl."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from grail_advantage.config import GrailConfig, OarConfig

OAR_METHODS = {"oar_g": "gradient", "oar_p": "perturbation"}
"""``algorithm.adv_estimator`` to the method of :class:`grail_advantage.OarConfig`."""


def weight_config(algorithm: DictConfig) -> GrailConfig | OarConfig:
    """The options of ``algorithm.adv_estimator``: those of ``algorithm.grail``, or of ``algorithm.oar`` with its method.

    Raises:
        ValueError: an unknown option or value; see the two classes.
    """
    estimator = algorithm.adv_estimator
    section = "oar" if estimator in OAR_METHODS else "grail"
    options = OmegaConf.to_container(algorithm.get(section) or OmegaConf.create(), resolve=True)
    if section == "grail":
        return GrailConfig.from_dict(options)
    if options.get("method") is not None:
        raise ValueError(
            f"oar.method={options['method']!r} cannot be set in a run; algorithm.adv_estimator=oar_g means gradient and oar_p "
            "means perturbation"
        )
    return OarConfig.from_dict({**options, "method": OAR_METHODS[estimator]})
