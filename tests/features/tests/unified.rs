//! Each package, built together with `farlane-features`, gets its dependencies with the features
//! that the whole workspace resolves.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// The features of each dependency, by its name and version.
type Features = BTreeMap<String, BTreeSet<String>>;

fn cargo(words: &[&str]) -> String {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(words)
        .args(["--offline"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

fn resolved(packages: &[&str]) -> Features {
    let words = ["tree", "--edges", "normal,dev,build", "--prefix", "none"];
    let text = cargo(&[&words[..], &["--format", "{p}|{f}"], packages].concat());
    let mut found = Features::new();
    for line in text.lines() {
        let Some((package, features)) = line.split_once('|') else {
            continue;
        };
        let package = package.replace(" (proc-macro)", "");
        let features = features.trim_end_matches(" (*)");
        // Packages of the workspace have the path of their folder.
        if !package.contains('/') {
            found
                .entry(package)
                .or_default()
                .insert(features.to_owned());
        }
    }
    found
}

#[test]
fn packages_by_themselves_have_the_features_of_the_workspace() {
    let all = resolved(&["--workspace"]);
    let metadata = cargo(&["metadata", "--no-deps", "--format-version", "1"]);
    let metadata: serde_json::Value = serde_json::from_str(&metadata).unwrap();
    let mut different = BTreeSet::new();
    for package in metadata["packages"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap();
        let words = ["--package", name, "--package", "farlane-features"];
        for (dependency, features) in resolved(&words) {
            // A build script's dependency may have others than the same one of a library.
            if !features.is_subset(&all[&dependency]) {
                different.insert(format!(
                    "{dependency} of {name}: {features:?}, in the workspace {:?}",
                    all[&dependency]
                ));
            }
        }
    }
    assert!(different.is_empty(), "{different:#?}");
}
