//! Replays the corpus, in the profile of all tests: with overflow checks.

#![allow(clippy::expect_used, clippy::unwrap_used)]

use farlane_fuzz_targets::targets::{self, ALL};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

fn fuzz_folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// The names of what is in a folder, without extensions.
fn names(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    entries
        .map(|entry| {
            let path = entry.unwrap().path();
            path.file_stem()
                .and_then(OsStr::to_str)
                .expect("a name in UTF-8")
                .to_owned()
        })
        .collect()
}

/// Says which input it was.
struct Current(PathBuf);

impl Drop for Current {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("The input is {}", self.0.display());
        }
    }
}

fn replay(target: &str, run: fn(&[u8])) {
    let folder = fuzz_folder("corpus").join(target);
    let mut inputs: Vec<PathBuf> = fs::read_dir(&folder)
        .unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    assert!(!inputs.is_empty(), "{} has no input", folder.display());
    // In an order that is always the same: some targets keep something from input to input.
    inputs.sort();
    for path in inputs {
        let bytes = fs::read(&path).unwrap();
        let _current = Current(path);
        run(&bytes);
    }
}

macro_rules! replays {
    ($($name:ident)*) => {
        $(
            mod $name {
                #[test]
                fn every_input_of_the_corpus_is_replayed() {
                    super::replay(stringify!($name), super::targets::$name::run);
                }
            }
        )*
    };
}

farlane_fuzz_targets::for_all_targets!(replays);

#[test]
fn every_target_has_a_program_and_a_corpus() {
    let targets: BTreeSet<String> = ALL.iter().map(|target| target.name.to_owned()).collect();
    assert_eq!(targets.len(), ALL.len());
    assert_eq!(targets, names(&fuzz_folder("corpus")));
    assert_eq!(targets, names(&fuzz_folder("src/bin")));
}
