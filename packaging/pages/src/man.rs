//! A man page (man-pages(7)): what clap knows of a command, then files and other pages.

use crate::programs::{self, Program};
use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use std::io;

/// Words of this length fit into a line of any terminal.
const LONG_WORD: usize = 40;

/// The pages of a program, its own and those of its subcommands: names and texts. Subcommands that
/// are programs of their own, by the same name with a dash, are on the pages of these.
///
/// # Errors
/// None: they are written to memory.
pub fn pages(program: &Program) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut command = program.command.clone().disable_help_subcommand(true);
    command.build();
    let mut pages = vec![page(program, &command, program.see_also)?];
    let name = format!("{}(1)", command.get_name());
    let subcommands = command.get_subcommands().filter(|s| !s.is_hide_set());
    for subcommand in subcommands.filter(|subcommand| programs::of(subcommand).is_none()) {
        pages.push(page(program, subcommand, &[&name])?);
    }
    Ok(pages)
}

fn page(program: &Program, command: &Command, see_also: &[&str]) -> io::Result<(String, Vec<u8>)> {
    let name = command.get_display_name().unwrap_or(command.get_name());
    let version = program.command.get_version().unwrap_or_default();
    let man = Man::new(command.clone())
        .source(format!("Farlane {version}"))
        .manual("Farlane");
    let mut text = Vec::new();
    man.render_title(&mut text)?;
    // No spaces are put in to make lines equally long.
    text.extend_from_slice(b".ad l\n");
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    man.render_options_section(&mut text)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut text)?;
    }
    let mut roff = Roff::new();
    roff.control("SH", ["FILES"]);
    for (file, what) in program.files {
        roff.control("TP", []);
        roff.text([bold(*file)]);
        roff.text([roman(*what)]);
    }
    roff.control("SH", ["SEE ALSO"]);
    let mut separator = "";
    let mut others = Vec::new();
    for other in see_also {
        let (page, section) = other.split_once('(').unwrap_or((other, ""));
        others.extend([roman(separator), bold(page), roman(format!("({section}"))]);
        separator = ", ";
    }
    roff.text(others);
    roff.to_writer(&mut text)?;
    Ok((name.to_owned(), breakable(&String::from_utf8_lossy(&text))))
}

/// Lets long words be broken (groff(7), `\:`): values with many keys are longer than a line.
fn breakable(text: &str) -> Vec<u8> {
    let word = |word: &str| match word.len() > LONG_WORD {
        true => word.replace('[', "\\:[").replace('|', "|\\:"),
        false => word.to_owned(),
    };
    let line = |line: &str| match line.starts_with('.') {
        true => line.to_owned(),
        false => line.split(' ').map(word).collect::<Vec<_>>().join(" "),
    };
    let lines: Vec<String> = text.lines().map(|text| line(text) + "\n").collect();
    lines.concat().into_bytes()
}
