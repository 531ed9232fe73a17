//! What programs are written against: libfarlane in C, a page made of its header, and in Rust, the
//! crate's own documentation by rustdoc. Their examples are those of the checkout, which tests
//! compile and run.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use farlane_kit::process::check_output;
use farlane_kit::progress;
use farlane_kit::workspace::Workspace;

/// The folder of the pages in the site, and that of rustdoc's pages in it.
pub const FOLDER: &str = "api";
pub const RUSTDOC: &str = "api/rust";

const HEADER: &str = "guest-lib/farlane/include/farlane.h";
const EXAMPLE_C: &str = "guest-lib/farlane/examples/transfer.c";
const EXAMPLE_RUST: &str = "guest-lib/farlane/examples/transfer.rs";

/// The pages: title, and name in [`FOLDER`].
pub const PAGES: &[(&str, &str)] = &[
    ("libfarlane in C", "libfarlane-c.md"),
    ("libfarlane in Rust", "libfarlane-rust.md"),
];

/// rustdoc compiles what the crate stands on.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Writes the pages where mdBook reads.
///
/// # Errors
/// When the header has a declaration without a comment, or rustdoc fails.
pub fn write(workspace: &Workspace, to: &Path) -> Result<()> {
    let read = |path: &str| {
        let path = workspace.root().join(path);
        fs::read_to_string(&path).with_context(|| format!("Cannot read {}", path.display()))
    };
    let folder = to.join(FOLDER);
    fs::create_dir_all(&folder).with_context(|| format!("Cannot make {}", folder.display()))?;
    let c = of_header(&read(HEADER)?).with_context(|| format!("Of {HEADER}"))?
        + &example("c", &read(EXAMPLE_C)?);
    let rust = of_rust() + &example("rust,ignore", &read(EXAMPLE_RUST)?);
    for ((title, name), text) in PAGES.iter().zip([c, rust]) {
        let path = folder.join(name);
        fs::write(&path, format!("# {title}\n\n{text}"))
            .with_context(|| format!("Cannot write {}", path.display()))?;
    }
    rustdoc(workspace, &to.join(RUSTDOC))
}

fn of_rust() -> String {
    "The crate `farlane`, on whose functions the ones of C stand: [its \
     items](rust/farlane/index.html), as rustdoc has them.\n"
        .to_owned()
}

fn example(language: &str, text: &str) -> String {
    format!("\n## Example\n\n```{language}\n{}\n```\n", text.trim_end())
}

/// Has rustdoc make the crate's pages, of which nothing else is in the folder where it builds.
fn rustdoc(workspace: &Workspace, to: &Path) -> Result<()> {
    let target = workspace.target().join("book-api");
    let made = target.join("doc");
    if made.exists() {
        fs::remove_dir_all(&made).with_context(|| format!("Cannot remove {}", made.display()))?;
    }
    let mut command = Command::new("cargo");
    command
        .current_dir(workspace.root())
        .args([
            "doc",
            "--package",
            "farlane",
            "--lib",
            "--no-deps",
            "--quiet",
        ])
        .arg("--target-dir")
        .arg(&target)
        .env("RUSTDOCFLAGS", "-D warnings");
    progress::step("Making rustdoc's pages of libfarlane", || {
        check_output("cargo doc", command, TIMEOUT)
    })?;
    let mut copy = Command::new("cp");
    copy.arg("-r").arg(&made).arg(to);
    check_output("cp", copy, TIMEOUT)?;
    let index = to.join("farlane/index.html");
    ensure!(index.exists(), "rustdoc made no {}", index.display());
    Ok(())
}

/// The page of a header: what its first comment says of all of it, and then each declaration with
/// its comment.
///
/// # Errors
/// When a declaration has no comment.
fn of_header(text: &str) -> Result<String> {
    let mut page = String::new();
    let mut comment = None;
    let mut lines = text.lines().peekable();
    // The licence is no comment about the interface.
    lines.next_if(|line| line.contains("SPDX-License-Identifier"));
    while let Some(line) = lines.next() {
        if line.starts_with("/*") {
            let mut said = line.to_owned();
            while !said.ends_with("*/") {
                said.push('\n');
                said.push_str(lines.next().context("A comment does not end")?);
            }
            let said = words_of(&said);
            match page.is_empty() {
                true => page = format!("{said}\n"),
                false => comment = Some(said),
            }
            continue;
        }
        if !is_declaration(line) {
            continue;
        }
        let mut declaration = line.to_owned();
        while !is_whole(&declaration) {
            declaration.push('\n');
            declaration.push_str(lines.next().context("A declaration does not end")?);
        }
        let name = name_of(&declaration).with_context(|| format!("No name in {declaration}"))?;
        let Some(said) = comment.take() else {
            bail!("{name} has no comment");
        };
        page.push_str(&format!(
            "\n## {name}\n\n```c\n{declaration}\n```\n\n{said}\n"
        ));
    }
    Ok(page)
}

/// Whether a line begins what a program uses: no directive but a constant, no closing brace.
fn is_declaration(line: &str) -> bool {
    let is_constant = line.starts_with("#define ") && line.split_whitespace().count() > 2;
    is_constant
        || line.starts_with(|c: char| c.is_ascii_alphabetic()) && !line.starts_with("extern \"C\"")
}

fn is_whole(declaration: &str) -> bool {
    let count = |c| declaration.matches(c).count();
    declaration.starts_with('#') || declaration.ends_with(';') && count('{') == count('}')
}

/// The name that a declaration gives: of a function or a type of one the word before the
/// parenthesis or in it, of a constant the second word, of another type the last one.
fn name_of(declaration: &str) -> Option<&str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if let Some(constant) = declaration.strip_prefix("#define ") {
        return constant.split_whitespace().next();
    }
    let before = match declaration.split_once("(*") {
        Some((_, pointer)) => pointer.split_once(')')?.0,
        None if declaration.contains('{') => declaration.rsplit_once('}')?.1,
        None => declaration.split_once('(').map_or(declaration, |(b, _)| b),
    };
    let mut words = before.split(|c| !is_part(c));
    words.rfind(|word| !word.is_empty())
}

/// The text of a comment.
fn words_of(comment: &str) -> String {
    let inside = comment.trim_start_matches("/*").trim_end_matches("*/");
    let lines = inside.lines();
    let lines = lines.map(|line| line.trim().trim_start_matches('*').trim());
    let text: Vec<&str> = lines.collect();
    text.join("\n").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_declaration_stands_with_its_comment() {
        let header = "/* SPDX-License-Identifier: MIT */\n/*\n * All of it.\n */\n#ifndef A_H\n\
                      #define A_H\n#ifdef __cplusplus\nextern \"C\" {\n#endif\n/* A constant. */\n\
                      #define A_ONE 1\n/* A type. */\ntypedef struct {\n\tint b;\n} a_type;\n\
                      /* One that\n * is called. */\ntypedef void (*a_call)(int c);\n\
                      /* A function. */\nint a_function(const a_type *d,\n\t       int e);\n\
                      #ifdef __cplusplus\n}\n#endif\n#endif /* A_H */\n";
        let page = of_header(header).unwrap();
        let headings: Vec<_> = page
            .lines()
            .filter(|line| line.starts_with("## "))
            .collect();
        assert_eq!(
            headings,
            ["## A_ONE", "## a_type", "## a_call", "## a_function"]
        );
        assert!(page.starts_with("All of it.\n"), "{page}");
        assert!(page.contains("\nOne that\nis called.\n"), "{page}");
        assert!(page.contains("d,\n\t       int e);\n```"), "{page}");
        let error = of_header("/* a */\n\nint b(void);\n").unwrap_err();
        assert_eq!(error.to_string(), "b has no comment");
    }

    #[test]
    fn all_that_libfarlane_declares_is_on_its_page() {
        let workspace = Workspace::find().unwrap();
        let header = fs::read_to_string(workspace.root().join(HEADER)).unwrap();
        let page = of_header(&header).unwrap();
        let source = workspace.root().join("guest-lib/farlane/src/c.rs");
        let source = fs::read_to_string(source).unwrap();
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let words = source.split(|c| !is_part(c));
        let functions = words.filter(|word| word.starts_with("farlane_") && *word != "farlane_abi");
        let functions: std::collections::BTreeSet<_> = functions.collect();
        assert!(functions.len() > 15, "{functions:?}");
        for name in functions {
            assert!(page.contains(&format!("\n## {name}\n")), "no {name}");
        }
    }
}
