//! The completion script for bash, from that of clap.
//!
//! clap's script has four faults, which are corrected in its text: its labels differ from the names that it looks up when
//! a program's name has a hyphen, so that only the first word completes; a word that must be a file offers options; it
//! completes no `--option=VALUE`; and it offers hidden commands.

use std::collections::BTreeMap;

use clap::Command;
use clap_complete::Shell;

/// What clap puts between the names of a command and its subcommand, and in place of a hyphen.
const SEPARATOR: &str = "__subcmd__";

/// Where the script looks at the word before the cursor. An equals sign is a word of its own there.
const PREVIOUS: &str = "    prev=\"$3\"\n";
const PREVIOUS_OF_VALUE: &str = r#"    prev="$3"
    if [[ ${cur} == "=" ]]; then
        cur=""
    fi
    if [[ ${prev} == "=" ]]; then
        prev="${COMP_WORDS[COMP_CWORD-2]}"
    fi
"#;

/// The script of `program`.
pub(super) fn script(program: &mut Command) -> String {
    let name = program.get_name().to_owned();
    let mut text = Vec::new();
    clap_complete::generate(Shell::Bash, program, &name, &mut text);
    let function = name.replace('-', "__");
    let script = String::from_utf8_lossy(&text)
        .replace(&name.replace('-', SEPARATOR), &function)
        .replace(PREVIOUS, PREVIOUS_OF_VALUE)
        // The shell completes file names itself where there is no other candidate.
        .replace("COMPREPLY=($(compgen -f \"${cur}\"))", "COMPREPLY=()");
    let mut commands = BTreeMap::new();
    collect(program, function, &mut commands);
    let mut command = None;
    script.lines().map(|line| corrected(line, &commands, &mut command) + "\n").collect()
}

/// Adds `command` and its subcommands by their labels in the script.
fn collect<'c>(command: &'c Command, label: String, commands: &mut BTreeMap<String, &'c Command>) {
    for subcommand in command.get_subcommands() {
        let name = subcommand.get_name().replace('-', SEPARATOR);
        collect(subcommand, format!("{label}{SEPARATOR}{name}"), commands);
    }
    commands.insert(label, command);
}

/// `line`, which is about `command` or begins the part of another one.
fn corrected<'c>(
    line: &str,
    commands: &BTreeMap<String, &'c Command>,
    command: &mut Option<&'c Command>,
) -> String {
    let indent = line.len() - line.trim_start().len();
    let text = line.trim_start();
    if let Some(label) = text.strip_suffix(')').filter(|_| indent == 8) {
        *command = commands.get(label).copied();
    }
    match *command {
        Some(command) if text.starts_with("opts=") => {
            let (options, words) = (options(command).join(" "), words(command).join(" "));
            format!("            opts=\"{options}\"\n            words=\"{words}\"")
        }
        // Options are for a word that begins as one; the first word is a subcommand, a value or a file.
        Some(_) if text.starts_with("if [[ ${cur} == -* ||") => {
            "            if [[ ${cur} == -* ]] ; then".to_owned()
        }
        Some(_) if indent == 12 && text.starts_with("COMPREPLY=( ") => line.replace("${opts}", "${words}"),
        _ => line.replace("local i cur prev opts cmd", "local i cur prev opts words cmd"),
    }
}

/// The options of `command`.
fn options(command: &Command) -> Vec<String> {
    let visible = || command.get_arguments().filter(|argument| !argument.is_hide_set());
    let short = visible().filter_map(|argument| argument.get_short()).map(|short| format!("-{short}"));
    let long = visible().filter_map(|argument| argument.get_long()).map(|long| format!("--{long}"));
    short.chain(long).collect()
}

/// What a word of `command` can be that is no option: a subcommand or a value. Its options where it takes no other words;
/// empty where it takes file names.
fn words(command: &Command) -> Vec<String> {
    let subcommands = command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set());
    let mut words: Vec<String> = subcommands.map(|subcommand| subcommand.get_name().to_owned()).collect();
    for value in command.get_positionals().flat_map(clap::Arg::get_possible_values) {
        words.push(value.get_name().to_owned());
    }
    if words.is_empty() && command.get_positionals().next().is_none() {
        return options(command);
    }
    words
}

#[cfg(test)]
mod tests {
    use clap::{Arg, ArgAction};

    use super::*;

    #[test]
    fn every_command_has_its_label_and_only_words_that_it_takes() {
        let run = Command::new("run-it").arg(Arg::new("FILE").required(true));
        let kind = Arg::new("KIND").value_parser(["one", "two"]);
        let list = Command::new("list").arg(kind).arg(Arg::new("all").long("all").action(ArgAction::SetTrue));
        let hidden = Command::new("inner").hide(true);
        let mut program = Command::new("egm-test").subcommands([run, list, hidden]);
        let script = script(&mut program);
        for expected in [
            "cmd=\"egm__test__subcmd__run__subcmd__it\"\n",
            "\n        egm__test__subcmd__run__subcmd__it)\n            opts=\"-h --help\"\n            words=\"\"\n",
            "\n        egm__test__subcmd__list)\n            opts=\"-h --all --help\"\n            words=\"one two\"\n",
            "\n        egm__test)\n            opts=\"-h --help\"\n            words=\"run-it list help\"\n",
            "            COMPREPLY=( $(compgen -W \"${words}\" -- \"${cur}\") )\n",
            "complete -F _egm__test -o nosort -o bashdefault -o default egm-test\n",
        ] {
            assert!(script.contains(expected), "{expected}: {script}");
        }
        assert!(!script.contains("COMP_CWORD} -eq") && script.contains("local i cur prev opts words cmd"));
    }
}
