# shellcheck shell=bash
# The environment names of the launch scripts, which source this: an old name, a name that only other scripts read, and
# a value of another form end the script with status 1, so that no run trains with something else than it was asked for.

stop() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}
unread() { # NAME, WHAT TO SET INSTEAD
    [[ -z ${!1:-} ]] || stop "$1=${!1@Q} is not read here; $2"
}
form() { # PATTERN, THE SAME IN WORDS, NAMES ...
    local name
    for name in "${@:3}"; do
        [[ -z ${!name:-} || ${!name} =~ ^($1)$ ]] || stop "$name=${!name@Q} must be $2"
    done
}
check_knobs() { # NAMES THAT ONLY OTHER SCRIPTS READ ...
    local name
    unread LEARNING_RATE "set ACTOR_LR"
    unread PROMPTS "set TRAIN_BATCH_SIZE"
    unread ROLLOUTS "set ROLLOUT_N"
    unread TRAIN_FILES "set TRAIN_FILE"
    unread VAL_FILES "set TEST_FILE"
    unread PRESET "add algorithm.grail.preset=${PRESET:-} to the command"
    unread OAR_VARIANT "add algorithm.oar.variant=${OAR_VARIANT:-} to the command"
    unread WARM_UP "python -m verl_cpu.tiny.make_models makes the tiny models anew"
    for name in "$@"; do
        unread "$name" "unset it; arguments of the command are Hydra overrides, and DRY_RUN=1 prints all options"
    done
    form "[01]" "0 or 1" DRY_RUN FRESH
    form "published|corrected" "published or corrected" LIKE
    form "[Tt]rue|[Ff]alse" "True or False" OFFLOAD
    form "[[:alnum:]_.:-]+" "the name of a method or of an estimator" ADV_ESTIMATOR
    form "[[:alnum:]_.:-]+(,[[:alnum:]_.:-]+)*" "names with commas between them" LOGGER
    form "[1-9][0-9]*" "a whole number from 1 on" NNODES NGPUS_PER_NODE TRAIN_BATCH_SIZE PPO_MINI_BATCH_SIZE \
        MAX_PROMPT_LENGTH MAX_RESPONSE_LENGTH PPO_MAX_TOKEN_LEN_PER_GPU ROLLOUT_N ROLLOUT_TP TOTAL_STEPS TOTAL_EPOCHS
    form "0|[1-9][0-9]*" "a whole number from 0 on" SEED LORA_RANK
    form "-1|0|[1-9][0-9]*" "a whole number of steps, or -1 for never" SAVE_FREQ TEST_FREQ
    form "[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?" "a number such as 1e-6" ACTOR_LR
    form "0?\.[0-9]+|1|1\.0+" "a share of the memory such as 0.6" ROLLOUT_GPU_MEM_UTIL
    [[ ${ADV_ESTIMATOR:-} != verl_grpo ]] ||
        stop "ADV_ESTIMATOR=verl_grpo: verl's own is ADV_ESTIMATOR=grpo now, the methods' baseline ADV_ESTIMATOR=uniform"
    for name in PWD MODEL_PATH TOKENIZER_PATH DATA_DIR TRAIN_FILE TEST_FILE OUTPUT_DIR PROJECT_NAME EXPERIMENT_NAME; do
        # shellcheck disable=SC2016
        [[ ${!name:-} != *'${'* ]] || stop "$name=${!name@Q}: Hydra reads \${ as a reference to an option; rename it"
    done
}

quoted() { # TEXT -> the same in Hydra's grammar, whatever its characters: a backslash is doubled before a quote alone
    printf %s "$1" | sed -z "s/\(\\\\*\)'/\1\1\\\\'/g; s/\(\\\\*\)\$/\1\1/; s/.*/'&'/"
}
split_list() { # TEXT -> the array `files`: the text, or the entries of a list [A,B]; one in quotes may hold commas
    files=("$1")
    [[ $1 == \[*\] ]] || return 0
    files=()
    local rest=${1:1:-1}, entry
    while [[ $rest =~ ^[[:blank:]]*(\'[^\']*\'|\"[^\"]*\"|[^,]*[^,[:blank:]]|)[[:blank:]]*,(.*)$ ]]; do
        entry=${BASH_REMATCH[1]}
        rest=${BASH_REMATCH[2]}
        [[ $entry =~ ^\'.*\'$|^\".*\"$ ]] && entry=${entry:1:-1}
        [[ -z $entry ]] || files+=("$entry")
    done
}
quoted_files() { # TEXT -> a path, or a list of paths, in Hydra's grammar
    local files file list=
    split_list "$1"
    for file in "${files[@]}"; do list+=,$(quoted "$file"); done
    [[ $1 == \[*\] ]] && echo "[${list:1}]" || echo "${list:1}"
}
