//! The built library exports what programs import, under the versions they name, and no more.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test")]

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

const MAP: &str = include_str!("../librdmacm.map");

/// The library that cargo built for this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let deps = test.parent().unwrap();
    let name = "libfarlane_rdmacm.so";
    [deps.join(name), deps.parent().unwrap().join(name)]
        .into_iter()
        .find(|path| path.exists())
        .expect("the library is built before its tests")
}

/// Every name of the map, with its version.
fn expected() -> BTreeSet<String> {
    let mut version = "";
    let mut names = BTreeSet::new();
    for word in MAP.split_whitespace() {
        if let Some(name) = word.strip_suffix(';').filter(|name| name.starts_with('r')) {
            names.insert(format!("{name}@@{version}"));
        } else if word.starts_with("RDMACM_") {
            version = word;
        }
    }
    names
}

fn readelf(arguments: &[&str]) -> String {
    let mut command = Command::new("readelf");
    let output = command.args(arguments).arg(library()).output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn names_have_the_versions_of_the_map_and_nothing_else_is_exported() {
    let symbols = readelf(&["--dyn-syms", "--wide"]);
    let defined = symbols.lines().filter_map(|line| {
        let columns: Vec<_> = line.split_whitespace().collect();
        let [_, _, _, kind, _, _, section, name] = columns[..] else {
            return None;
        };
        (!["UND", "ABS", "Ndx"].contains(&section) && kind != "SECTION").then(|| name.to_owned())
    });
    let expected = expected();
    assert_eq!(expected.len(), 68);
    assert_eq!(defined.collect::<BTreeSet<_>>(), expected);
}

#[test]
fn the_library_is_found_by_its_name_and_brings_the_verbs() {
    let dynamic = readelf(&["--dynamic", "--wide"]);
    assert!(dynamic.contains("soname: [librdmacm.so.1]"), "{dynamic}");
    assert!(dynamic.contains("library: [libibverbs.so.1]"), "{dynamic}");
    let versions = readelf(&["--dyn-syms", "--wide"]);
    assert!(versions.contains("ibv_modify_qp@IBVERBS_1.1"), "{versions}");
}
