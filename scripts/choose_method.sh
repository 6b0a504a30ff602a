# shellcheck shell=bash
# shellcheck disable=SC2154  # the variables come from and go to the sourcing script
#
# Shared by examples/common.sh and scripts/train_cpu.sh: turns ADV_ESTIMATOR's name, in adv_estimator, into the name that verl
# gets, and into method, the name of the run's folder. Fills in oar_variant where it is unset.

if [[ -z $oar_variant ]]; then
    # GRAIL's authors compared with their own port of OAR-G.
    [[ $adv_estimator == oar_g ]] && oar_variant=grail_port || oar_variant=official
fi
method=$adv_estimator
if [[ $adv_estimator == grpo ]]; then
    adv_estimator=uniform
    # shellcheck disable=SC2034
    method=uniform
    echo "ADV_ESTIMATOR=grpo: uniform, GRPO in the trainer of the other methods (weight 1, truncated responses masked alike);" \
        "verl's stock trainer is ADV_ESTIMATOR=verl_grpo" >&2
elif [[ $adv_estimator == verl_grpo ]]; then
    adv_estimator=grpo
    echo "ADV_ESTIMATOR=verl_grpo: verl's stock trainer, which does not mask truncated responses; the fair baseline is" \
        "ADV_ESTIMATOR=grpo" >&2
fi
