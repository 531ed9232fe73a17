//! Blocks of the documents that scenarios run as they stand.
//!
//! Such a block has a mark behind its fence, `run=SCENARIO/NAME`: the scenario asks for it by that
//! (`Run::block`), and fails where it leaves out one that is marked for it.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};
use farlane_kit::workspace::Workspace;

use crate::markdown::{marked, targets};

/// The list of the pages.
const SUMMARY: &str = "docs/SUMMARY.md";

/// What the documents tell QEMU about the processor, and what is told instead where one is
/// emulated.
const ACCELERATED: &str = "-accel kvm -cpu host";
const EMULATED: &str = "-accel tcg -cpu max";

/// The text of a block.
///
/// # Errors
/// When there is not one of that name.
pub fn block(workspace: &Workspace, name: &str) -> Result<String> {
    let mut found = Vec::new();
    for (_, text) in pages(workspace)? {
        let blocks = marked(&text).into_iter();
        let blocks = blocks.filter(|marked| marked.name == name);
        found.extend(blocks.map(|marked| marked.block));
    }
    match (found.pop(), found.is_empty()) {
        (Some(block), true) => Ok(block),
        (Some(_), false) => bail!("Several blocks of the documents are marked {name}"),
        (None, _) => bail!("No block of the documents is marked {name}"),
    }
}

/// The names of all blocks of a scenario.
///
/// # Errors
/// When a page cannot be read.
pub fn names(workspace: &Workspace, scenario: &str) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for (_, text) in pages(workspace)? {
        let blocks = marked(&text).into_iter();
        let blocks = blocks.filter(|marked| marked.scenario == scenario);
        names.extend(blocks.map(|marked| marked.name.to_owned()));
    }
    Ok(names)
}

/// A block with a line for QEMU, whose processors are emulated: of the line, that alone changes.
///
/// # Errors
/// When it does not say once what runs the processors.
pub fn emulated(block: &str) -> Result<String> {
    let times = block.matches(ACCELERATED).count();
    ensure!(times == 1, "{ACCELERATED} is {times} times in:\n{block}");
    Ok(block.replace(ACCELERATED, EMULATED))
}

/// All pages of the site: path in the checkout, and text.
fn pages(workspace: &Workspace) -> Result<Vec<(PathBuf, String)>> {
    let read = |path: &str| {
        let path = workspace.root().join(path);
        fs::read_to_string(&path).with_context(|| format!("Cannot read {}", path.display()))
    };
    let summary = read(SUMMARY)?;
    let links = summary
        .lines()
        .flat_map(|line| targets(line).map(move |range| &line[range]));
    let pages = links.map(|link| {
        let path = format!("docs/{link}");
        let text = read(&path)?;
        Ok((PathBuf::from(path), text))
    });
    pages.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenarios;

    /// The names by which the sources of scenarios ask for blocks.
    fn asked_for(folder: &std::path::Path, names: &mut BTreeSet<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                asked_for(&path, names);
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let words = text.split('"').skip(1).step_by(2);
            names.extend(words.map(str::to_owned));
        }
    }

    #[test]
    fn each_block_that_is_marked_is_run_in_a_test_run() {
        let workspace = Workspace::find().unwrap();
        let mut asked = BTreeSet::new();
        asked_for(
            &workspace.root().join("tests/xtask/src/scenarios"),
            &mut asked,
        );
        let mut names = BTreeSet::new();
        for (page, text) in pages(&workspace).unwrap() {
            for marked in marked(&text) {
                let what = format!("{}: {}", page.display(), marked.name);
                let scenario = scenarios::find(marked.scenario).expect(&what);
                assert!(scenario.is_test, "{what} is in no test run");
                assert!(asked.contains(marked.name), "{what}: nobody asks for it");
                assert!(
                    names.insert(marked.name.to_owned()),
                    "{what} is there twice"
                );
            }
        }
        assert!(!names.is_empty());
        // What is asked for is there.
        let is_name = |word: &&String| {
            let of = word.split_once('/').map(|(scenario, _)| scenario);
            of.is_some_and(|scenario| {
                names
                    .iter()
                    .any(|name| name.starts_with(&format!("{scenario}/")))
            })
        };
        let unmarked = asked.iter().filter(is_name);
        let unmarked: Vec<_> = unmarked.filter(|name| !names.contains(*name)).collect();
        assert!(unmarked.is_empty(), "No block is marked {unmarked:?}");
    }

    #[test]
    fn marks_stand_on_pages_of_the_site_alone() {
        let workspace = Workspace::find().unwrap();
        let pages: BTreeSet<PathBuf> = pages(&workspace)
            .unwrap()
            .into_iter()
            .map(|(path, _)| workspace.root().join(path).canonicalize().unwrap())
            .collect();
        let mut folders = vec![workspace.root().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let name = path
                    .file_name()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned();
                if path.is_symlink() || name == "target" || name.starts_with('.') {
                    continue;
                }
                if path.is_dir() {
                    folders.push(path);
                } else if name.ends_with(".md") && !pages.contains(&path.canonicalize().unwrap()) {
                    let text = fs::read_to_string(&path).unwrap();
                    assert!(marked(&text).is_empty(), "{} is no page", path.display());
                }
            }
        }
    }

    #[test]
    fn of_a_line_for_qemu_the_processor_alone_changes() {
        let line = "qemu-system-x86_64 -accel kvm -cpu host -m 4G\n";
        assert_eq!(
            emulated(line).unwrap(),
            "qemu-system-x86_64 -accel tcg -cpu max -m 4G\n"
        );
        assert!(emulated("qemu-system-x86_64 -m 4G\n").is_err());
    }
}
