//! A page of the site, in Markdown: what clap knows of a program and its subcommands, as its man
//! pages say it.

use crate::programs::{self, Program};
use clap::builder::StyledStr;
use clap::{Arg, Command};
use std::fmt::Write as _;

/// The page of a program and of its subcommands.
#[must_use]
pub fn page(program: &Program) -> String {
    let mut command = program.command.clone().disable_help_subcommand(true);
    command.build();
    let name = command.get_name().to_owned();
    let mut text = format!("# {name}\n");
    section(&command, &mut text);
    for subcommand in command.get_subcommands().filter(|s| !s.is_hide_set()) {
        let name = subcommand.get_bin_name().unwrap_or(subcommand.get_name());
        let _ = write!(text, "\n## {name}\n");
        match programs::of(subcommand) {
            Some(program) => {
                let _ = write!(
                    text,
                    "\n[{program}]({program}.md), with all of its options.\n"
                );
            }
            None => section(subcommand, &mut text),
        }
    }
    text.push_str("\n## Files\n\n| file | what |\n|---|---|\n");
    for (file, what) in program.files {
        let _ = writeln!(text, "| `{file}` | {} |", escaped(what));
    }
    let all = programs::all();
    let others = program.see_also.iter().map(|other| {
        let (page, _) = other.split_once('(').unwrap_or((other, ""));
        match all.iter().any(|one| one.command.get_name() == page) {
            true => format!("[{page}]({page}.md)"),
            false => format!("`{other}`"),
        }
    });
    let others: Vec<String> = others.collect();
    let _ = write!(text, "\nSee also {}.\n", others.join(", "));
    text
}

/// What a command does, how it is called, and its arguments.
fn section(command: &Command, text: &mut String) {
    let about = command.get_long_about().or(command.get_about());
    if let Some(about) = about {
        let _ = write!(text, "\n{}\n", escaped(&about.to_string()));
    }
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").trim();
    let _ = write!(text, "\n```text\n{usage}\n```\n");
    let mut rows = command
        .get_arguments()
        .filter(|argument| !argument.is_hide_set())
        .peekable();
    if rows.peek().is_some() {
        text.push_str("\n| option | default | what |\n|---|---|---|\n");
    }
    for argument in rows {
        let _ = writeln!(
            text,
            "| {} | {} | {} |",
            spelling(argument),
            default(argument),
            help(argument)
        );
    }
}

/// How an argument is written.
fn spelling(argument: &Arg) -> String {
    let takes_value = argument.is_positional() || argument.get_action().takes_values();
    let values = argument.get_value_names().unwrap_or_default();
    let values = match values {
        [] => argument.get_id().as_str().to_uppercase(),
        values => values.join(" "),
    };
    let value = |before: &str| match takes_value {
        true => format!("{before}{values}"),
        false => String::new(),
    };
    let short = argument.get_short().map(|short| format!("-{short}"));
    let long = argument.get_long().map(|long| format!("--{long}"));
    let mut names: Vec<String> = short.into_iter().chain(long).collect();
    match names.last_mut() {
        Some(last) => last.push_str(&value(" ")),
        None => names.push(value("")),
    }
    let names = names.iter().map(|name| code(name));
    names.collect::<Vec<_>>().join(", ")
}

fn default(argument: &Arg) -> String {
    let is_shown = argument.get_action().takes_values() && !argument.is_hide_default_value_set();
    let defaults = argument.get_default_values().iter().filter(|_| is_shown);
    let defaults = defaults.map(|value| code(&value.to_string_lossy()));
    defaults.collect::<Vec<_>>().join(", ")
}

/// What an argument is for, and which values it takes where these are counted.
fn help(argument: &Arg) -> String {
    let help = argument.get_long_help().or(argument.get_help());
    let help = help.map(StyledStr::to_string).unwrap_or_default();
    let mut parts: Vec<String> = help
        .split("\n\n")
        .map(|part| escaped(&part.split_whitespace().collect::<Vec<_>>().join(" ")))
        .filter(|part| !part.is_empty())
        .collect();
    let values = match argument.get_action().takes_values() {
        true => argument.get_possible_values(),
        false => Vec::new(),
    };
    for value in values.iter().filter(|value| !value.is_hide_set()) {
        let what = value.get_help().map(StyledStr::to_string);
        let what = what.map(|what| format!(": {}", escaped(&what)));
        parts.push(format!(
            "{}{}",
            code(value.get_name()),
            what.unwrap_or_default()
        ));
    }
    parts.join("<br>")
}

/// A span of code, in a cell of a table.
fn code(text: &str) -> String {
    format!("`{}`", text.replace('|', "\\|"))
}

/// A text that has nothing of what Markdown and HTML give a meaning.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '&' => out.push_str("&amp;"),
            '\\' | '`' | '*' | '_' | '[' | ']' | '|' | '#' => out.extend(['\\', c]),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ArgAction;
    use clap::builder::PossibleValue;

    #[test]
    fn a_page_has_each_option_with_its_value_default_and_help() {
        let size = Arg::new("size").short('s').long("size").value_name("BYTES");
        let way = Arg::new("way").long("way").help("Which way").value_parser([
            PossibleValue::new("near").help("This node's"),
            PossibleValue::new("far"),
        ]);
        let command = Command::new("farlane-x")
            .about("Does <x>")
            .arg(size.default_value("1M").help("How much, as a|b.\n\nTwice."))
            .arg(way)
            .arg(Arg::new("fast").long("fast").action(ArgAction::SetTrue))
            .arg(Arg::new("secret").long("secret").hide(true))
            .subcommand(Command::new("list").about("Lists").arg(Arg::new("NAME")));
        let page = page(&Program {
            command,
            files: &[("/run/x", "A socket.")],
            see_also: &["farlane-blk(1)", "ld.so(8)"],
        });
        for expected in [
            "# farlane-x\n\nDoes &lt;x>\n\n```text\nfarlane-x [OPTIONS]",
            "| `-s`, `--size BYTES` | `1M` | How much, as a\\|b.<br>Twice. |\n",
            "| `--way WAY` |  | Which way<br>`near`: This node's<br>`far` |\n",
            "| `--fast` |  |  |\n",
            "\n## farlane-x list\n\nLists\n",
            "| `NAME` |  |  |\n",
            "| `/run/x` | A socket. |\n",
            "\nSee also [farlane-blk](farlane-blk.md), `ld.so(8)`.\n",
        ] {
            assert!(page.contains(expected), "{expected:?} is not in\n{page}");
        }
        assert!(!page.contains("secret"), "{page}");
    }

    #[test]
    fn the_pages_of_programs_have_their_options() {
        for program in programs::all() {
            let page = page(&program);
            let mut command = program.command.clone();
            command.build();
            let mut commands = vec![&command];
            while let Some(command) = commands.pop() {
                let arguments = command.get_arguments().filter(|one| !one.is_hide_set());
                for long in arguments.filter_map(Arg::get_long) {
                    let is_help = ["help", "version"].contains(&long);
                    let is_there = is_help || page.contains(&format!("`--{long}"));
                    assert!(is_there, "--{long}:\n{page}");
                }
                let below = command.get_subcommands().filter(|one| !one.is_hide_set());
                for subcommand in below.filter(|one| one.get_name() != "help") {
                    match programs::of(subcommand) {
                        Some(name) => assert!(page.contains(&format!("({name}.md)"))),
                        None => commands.push(subcommand),
                    }
                }
            }
        }
    }
}
