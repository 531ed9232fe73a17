//! What the documents cite exists, and lines are short. See `what_documents_cite_exists` for what
//! counts as a citation.

mod cited;
mod parts;
mod sources;

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use farlane_kit::workspace::Workspace;
use sources::Sources;

use crate::scenarios;

/// The longest line of a document's prose and of a Rust file, in characters.
const COLUMNS: usize = 100;

static SOURCES: LazyLock<Sources> = LazyLock::new(|| Sources::read(&root()));

fn root() -> PathBuf {
    Workspace::find().unwrap().root().to_owned()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

/// All documents: path in the checkout, and text.
fn documents(sources: &Sources) -> Vec<(&Path, String)> {
    let is_document = |path: &&PathBuf| path.extension().is_some_and(|end| end == "md");
    let documents = sources.files().iter().filter(is_document);
    documents
        .map(|path| (path.as_path(), read(&root().join(path))))
        .collect()
}

fn none(found: &[String], what: &str) {
    assert!(found.is_empty(), "{what}:\n{}", found.join("\n"));
}

/// A citation is an inline code span, or a command in a fenced block:
///
/// * a path, or a file name with an ending that sources have: there is such a file or folder, seen
///   from the checkout's top, from the document, or as the end of a longer path;
/// * `a::b`, a function, type, constant or variant: defined in the sources, in a file or a type
///   that is called as the segment before it; a crate of others is let pass;
/// * a name of several parts (`snake_case`, `CamelCase`, `UPPER_CASE`): a word of the code, outside
///   of comments;
/// * `--option`: some program's;
/// * `cargo xtask ...`: that is a command which its parser takes, of scenarios that there are;
///   `cargo test -p PACKAGE` names a package, and `farlane-...` a package or a program.
#[test]
fn what_documents_cite_exists() {
    let sources = &*SOURCES;
    let mut found = Vec::new();
    for (path, text) in documents(sources) {
        for (line, code) in parts::code(&text) {
            for problem in cited::problems(sources, path, code) {
                found.push(format!("{}:{line}: `{code}`: {problem}", path.display()));
            }
        }
    }
    none(&found, "Cited, but there is no such thing");
}

#[test]
fn links_of_documents_lead_somewhere() {
    let sources = &*SOURCES;
    let mut found = Vec::new();
    for (path, text) in documents(sources) {
        for (line, target) in parts::links(&text) {
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let to = match file {
                "" => root().join(path),
                file => root().join(path).parent().unwrap().join(file),
            };
            let is_there =
                to.exists() && (anchor.is_empty() || parts::anchors(&read(&to)).contains(anchor));
            if !is_there {
                found.push(format!("{}:{line}: {target}", path.display()));
            }
        }
    }
    none(&found, "Links that lead nowhere");
}

#[test]
fn every_scenario_is_in_the_page_about_tests() {
    let page = read(&root().join("docs/testing.md"));
    let words = sources::words(&page, |c| c.is_alphanumeric() || matches!(c, '-' | '.'));
    let missing = scenarios::ALL.iter().map(|scenario| scenario.name);
    // Longer forms and those with two workers stand with what they are forms of.
    let of = |name: &'static str| name.trim_end_matches("-long").trim_end_matches("-workers");
    let missing = missing.filter(|name| !words.contains(of(name)));
    let missing: Vec<String> = missing.map(str::to_owned).collect();
    none(&missing, "Scenarios that docs/testing.md does not name");
}

#[test]
fn each_failure_is_shown_by_a_scenario_and_each_pages_section_is_named() {
    let page = read(&root().join("docs/failures.md"));
    let mut rows = 0;
    for row in page.lines().filter(|line| line.starts_with("| ")) {
        let shown = row.trim_end_matches(" |").rsplit("| ").next().unwrap();
        if shown == "shown by" {
            continue;
        }
        rows += 1;
        for name in shown.split(", ") {
            let scenario = scenarios::find(name.trim_matches('`')).expect(row);
            assert!(scenario.is_test, "{name} is in no test run: {row}");
        }
    }
    assert!(rows > 10, "{rows} rows");
    let links = parts::links(&page);
    for (path, text) in documents(&SOURCES) {
        let anchors = parts::anchors(&text).into_iter();
        let mut sections = anchors.filter(|name| name.starts_with("when-something-"));
        let name = path.file_name().unwrap().to_string_lossy();
        let is_named = |section: &String| {
            let target = format!("{name}#{section}");
            links.iter().any(|(_, link)| *link == target)
        };
        assert!(
            sections.all(|section| is_named(&section)),
            "{}",
            path.display()
        );
    }
}

#[test]
fn lines_are_short() {
    let sources = &*SOURCES;
    let is_long = |line: &str| line.chars().count() > COLUMNS;
    let mut found = Vec::new();
    for (path, text) in documents(sources) {
        let long = parts::prose(&text).filter(|(_, line)| is_long(line));
        found.extend(long.map(|(number, _)| format!("{}:{number}", path.display())));
    }
    let is_rust = |path: &&PathBuf| path.extension().is_some_and(|end| end == "rs");
    for path in sources.files().iter().filter(is_rust) {
        let text = read(&root().join(path));
        let long = text.lines().zip(1..).filter(|(line, _)| is_long(line));
        found.extend(long.map(|(_, number)| format!("{}:{number}", path.display())));
    }
    none(&found, &format!("Lines of over {COLUMNS} characters"));
}
