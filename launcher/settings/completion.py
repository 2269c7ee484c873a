"""Shell completion: scripts for bash, zsh and fish, made from the table of options.

All three are told the same: after an option that takes a value, what that may be; before the script, our options; from
the script on, the names of files, for what a script wants is its own affair.
"""

from __future__ import annotations

from launcher.job import UsageError
from launcher.settings.options import BY_NAME, KEYS, OPTIONS, Option, nearest
from launcher.settings.values import SHELLS

_SETTINGS = [*(f"{key}=" for key in KEYS if key != "args"), "args."]

# The line is split at blanks here: bash itself splits words at `=` and `:` too, and leaves these as words of their own.
_BASH = """\
# Completes ddp-launch in bash: ddp-launch --completion bash >> ~/.bashrc
_ddp_launch() {
    local cur=${COMP_WORDS[COMP_CWORD]} line=${COMP_LINE:0:COMP_POINT} option="" word words
    [[ $cur == "=" ]] && cur=""
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local last=${words[${#words[@]} - 1]}
    for word in "${words[@]:1:${#words[@]} - 2}"; do
        if [[ -n $option ]]; then
            [[ $option == -m ]] && return
            option=""
            continue
        fi
        case $word in
        VALUED) option=$word ;;
        -- | -m?*) return ;;
        -*) ;;
        *) return ;;
        esac
    done
    [[ -z $option && $last == --*=* ]] && option=${last%%=*} && last=${last#*=}
    case $option in
CASES
    "") [[ $last == -* ]] && COMPREPLY=($(compgen -W "NAMES" -- "$cur")) ;;
    *) compopt +o default ;;
    esac
}
complete -o default -F _ddp_launch ddp-launch
"""

_ZSH = """\
#compdef ddp-launch
# Completes ddp-launch in zsh: ddp-launch --completion zsh > DIR/_ddp-launch, with DIR in $fpath before compinit
_ddp_launch() {
    _arguments -S -A "-*" \\
SPECS
        '1:script:_files' \\
        '*:: :_files'
}
if [[ $funcstack[1] == _ddp_launch ]]; then
    _ddp_launch "$@"
else
    compdef _ddp_launch ddp-launch
fi
"""

_FISH = """\
# Completes ddp-launch in fish: ddp-launch --completion fish > ~/.config/fish/completions/ddp-launch.fish
function __ddp_launch_before_script
    set -l option ""
    for word in (commandline -opc)[2..-1]
        if test -n "$option"
            test "$option" = -m; and return 1
            set option ""
        else if contains -- $word VALUED
            set option $word
        else if not string match -q -- '-*' $word; or string match -qr -- '^(--|-m.+)$' $word
            return 1
        end
    end
    return 0
end
SPECS
"""


def script(shell: str) -> str:
    """What that shell is to run. Raises: UsageError if it is none of ours."""
    if shell not in SHELLS:
        raise UsageError(f"--completion should be one of {', '.join(SHELLS)}, not {shell!r}{nearest(shell, SHELLS)}")
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]()


def _bash() -> str:
    cases = "\n".join(f"    {option.name}) {action} ;;" for option in OPTIONS if (action := _bash_action(option)))
    names = " ".join(option.name for option in OPTIONS)
    valued = " | ".join(name for name, option in BY_NAME.items() if option.metavar)
    return _BASH.replace("CASES", cases).replace("NAMES", names).replace("VALUED", valued)


def _bash_action(option: Option) -> str:
    suggest = option.kind.suggest
    if option.name == "--set":
        return f'[[ $last == *=* ]] || COMPREPLY=($(compgen -W "{" ".join(_SETTINGS)}" -- "$cur")); compopt -o nospace'
    if suggest == "file":
        return ":"
    if suggest == "folder":
        return "compopt +o default -o dirnames"
    return f'COMPREPLY=($(compgen -W "{" ".join(suggest)}" -- "$cur")); compopt +o default' if suggest else ""


def _zsh() -> str:
    return _ZSH.replace("SPECS", "\n".join(f"        {_quoted(_zsh_spec(option))} \\" for option in OPTIONS))


def _zsh_spec(option: Option) -> str:
    if not option.metavar:
        return f"*{option.name}[{_zsh_escaped(option.help)}]"
    attached = "=" if option.name.startswith("--") else "+"
    rest = ":*: :_files" if option.name == "-m" else ""  # what follows is the module's
    return f"*{option.name}{attached}[{_zsh_escaped(option.help)}]:{option.metavar}:{_zsh_action(option)}{rest}"


def _zsh_action(option: Option) -> str:
    suggest = option.kind.suggest
    if option.name == "--set":
        return f"compadd -S '' -- {' '.join(_SETTINGS)}"
    if isinstance(suggest, str):
        return {"file": "_files", "folder": "_files -/"}[suggest]
    return f"({' '.join(suggest)})" if suggest else " "


def _zsh_escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "[]:\\" else letter for letter in text)


def _fish() -> str:
    valued = " ".join(name for name, option in BY_NAME.items() if option.metavar)
    return _FISH.replace("SPECS", "\n".join(map(_fish_spec, OPTIONS))).replace("VALUED", valued)


def _fish_spec(option: Option) -> str:
    name = f"-l {option.name[2:]}" if option.name.startswith("--") else f"-s {option.name[1:]}"
    return (
        f"complete -c ddp-launch -n __ddp_launch_before_script {name}{_fish_action(option)} -d {_quoted(option.help)}"
    )


def _fish_action(option: Option) -> str:
    suggest = option.kind.suggest
    if not option.metavar:
        return ""
    if option.name == "--set":
        return f" -x -a '{' '.join(_SETTINGS)}'"
    if suggest == "file":
        return " -r -F"
    if suggest == "folder":
        return " -x -a '(__fish_complete_directories)'"
    return f" -x -a '{' '.join(suggest)}'" if suggest else " -x"


def _quoted(text: str) -> str:
    r"""In single quotes, as zsh and fish both read it."""
    return "'" + text.replace("'", "'\"'\"'") + "'"
