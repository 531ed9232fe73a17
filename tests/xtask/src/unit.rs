//! Unit, property and loom tests: which packages a filter means, and the jobs that run their test
//! programs.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use farlane_kit::process::check_output;
use farlane_kit::workspace::{TestProgram, Workspace};
use serde_json::Value;

use crate::jobs::{Ended, Job, Verdict, Weight};

/// How long one test program may take on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(600);

/// How long cargo may take to describe the workspace.
const METADATA_TIMEOUT: Duration = Duration::from_secs(120);

/// A package of the workspace.
#[derive(Debug)]
pub struct Package {
    name: String,
    /// How [`TestProgram`]s and this module call it.
    folder: String,
    /// Its tests: the module and the name of each.
    tests: Vec<String>,
}

impl Package {
    /// All packages, with the tests in their sources.
    ///
    /// # Errors
    /// When cargo or the file system fails.
    pub fn all(workspace: &Workspace) -> Result<Vec<Self>> {
        let command = workspace.cargo(&["metadata", "--no-deps", "--format-version", "1"]);
        let text = check_output("cargo metadata", command, METADATA_TIMEOUT)?;
        let metadata: Value = serde_json::from_str(&text).context("cargo metadata is no JSON")?;
        let packages = metadata["packages"]
            .as_array()
            .context("cargo names no packages")?;
        packages
            .iter()
            .map(|package| Self::read(package, workspace.root()))
            .collect()
    }

    fn read(package: &Value, top: &Path) -> Result<Self> {
        let name = package["name"].as_str().context("A package has no name")?;
        let manifest = package["manifest_path"].as_str().unwrap_or_default();
        let folder = Path::new(manifest)
            .parent()
            .with_context(|| format!("{name} has no folder"))?;
        let mut tests = Vec::new();
        for part in ["src", "tests", "examples"] {
            let root = folder.join(part);
            if root.is_dir() {
                find_tests(&root, "", &mut tests)?;
            }
        }
        Ok(Self {
            name: name.to_owned(),
            folder: folder
                .strip_prefix(top)
                .unwrap_or(folder)
                .display()
                .to_string(),
            tests,
        })
    }

    /// Its name, its folder in the checkout, and whether it has tests.
    #[cfg(test)]
    pub fn tested(&self) -> (&str, &str, bool) {
        (&self.name, &self.folder, !self.tests.is_empty())
    }

    /// Whether a filter means the package or some of its tests.
    fn is_meant(&self, filter: &str) -> bool {
        // The filter may name a test program, such as `blk/tests/disk`.
        let parts = ["/src", "/tests/", "/bin/", "/example/"];
        let by_program = parts.iter().any(|part| {
            let folder = filter.find(part).map(|at| &filter[..at]);
            folder.is_some_and(|folder| self.folder.ends_with(folder))
        });
        by_program
            || self.name.contains(filter)
            || self.folder.ends_with(filter)
            || self.tests.iter().any(|test| test.contains(filter))
    }
}

/// The names of the packages that a filter means.
pub fn packages_meant<'a>(packages: &'a [Package], filter: &str) -> Vec<&'a str> {
    let meant = packages.iter().filter(|package| package.is_meant(filter));
    meant.map(|package| package.name.as_str()).collect()
}

/// Finds functions in sources, each behind the path of its module, as test programs call them.
fn find_tests(folder: &Path, module: &str, tests: &mut Vec<String>) -> Result<()> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("Cannot read {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let below = |name: &str| match (module, name) {
            (module, "mod" | "lib" | "main") => module.to_owned(),
            ("", name) => name.to_owned(),
            (module, name) => format!("{module}::{name}"),
        };
        if path.is_dir() {
            find_tests(&path, &below(&name), tests)?;
        } else if let Some(name) = name.strip_suffix(".rs") {
            let text = fs::read_to_string(&path)
                .with_context(|| format!("Cannot read {}", path.display()))?;
            tests.extend(tests_in(&text, &below(name)));
        }
    }
    Ok(())
}

/// The functions of one file that are marked as tests.
fn tests_in(text: &str, module: &str) -> Vec<String> {
    let mut tests = Vec::new();
    let mut inside = module.to_owned();
    let mut is_test = false;
    for line in text.lines().map(str::trim_start) {
        if line.starts_with("mod tests") {
            inside = format!("{module}::tests");
        } else if line.starts_with("#[test]") {
            is_test = true;
        } else if is_test && let Some((_, rest)) = line.split_once("fn ") {
            let name: String = rest
                .chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect();
            tests.push(format!("{inside}::{name}"));
            is_test = false;
        }
    }
    tests
}

/// Test programs that take little of a processor, and long: leases and links that end by time.
const WAITING: [&str; 1] = ["vfio-remote/tests/lending"];

/// The jobs that run test programs, or what of them a filter means.
pub fn jobs(programs: Vec<TestProgram>, filter: Option<&str>) -> Vec<Job> {
    programs
        .into_iter()
        .map(|program| {
            let mut command = Command::new(&program.program);
            command
                .current_dir(&program.folder)
                .env("CARGO_MANIFEST_DIR", &program.folder);
            if let Some(filter) = filter.filter(|filter| !program.name.contains(filter)) {
                command.arg(filter);
            }
            Job {
                weight: match WAITING.contains(&program.name.as_str()) {
                    true => Weight::Waits,
                    false => Weight::One,
                },
                name: program.name,
                command,
                timeout: TIMEOUT,
                judge,
            }
        })
        .collect()
}

/// The examples in the documentation, which cargo compiles and runs.
pub fn doc_job(workspace: &Workspace) -> Job {
    Job {
        name: "examples in the documentation".into(),
        command: workspace.cargo(&["test", "--workspace", "--doc"]),
        weight: Weight::One,
        timeout: TIMEOUT,
        judge,
    }
}

/// Adds up the results that test programs print.
pub fn judge(ended: &Ended<'_>) -> Verdict {
    let mut verdict = Verdict::default();
    let mut results = 0;
    for (passed, failed) in ended.said.lines().filter_map(parse_result) {
        verdict.passed += passed;
        verdict.failed += failed;
        results += 1;
    }
    if results == 0 {
        // It has come to its end without a test's result.
        verdict.failed += 1;
    }
    verdict
}

/// Reads how many passed and failed in "test result: ok. 5 passed; 0 failed; ...".
pub fn parse_result(line: &str) -> Option<(u64, u64)> {
    let (_, figures) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let count = |word: &str| {
        let part = figures
            .split(';')
            .find_map(|part| part.trim().strip_suffix(word))?;
        part.trim().parse().ok()
    };
    Some((count("passed")?, count("failed")?))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn results_are_added_up_and_their_absence_is_a_failure() {
        let line = |passed: u32, failed: u32| {
            format!(
                "test result: x. {passed} passed; {failed} failed; 0 ignored; 0 measured; 1 \
                 filtered out; finished in 0.10s\n"
            )
        };
        let said = [line(12, 0), line(3, 1)].concat();
        let ended = |said| {
            judge(&Ended {
                success: true,
                said,
                record: None,
            })
        };
        assert_eq!((ended(&said).passed, ended(&said).failed), (15, 1));
        assert_eq!(ended("test tests::x ... ok").failed, 1);
    }

    #[test]
    fn tests_are_found_with_their_modules() {
        let text = "fn no() {}\n#[cfg(test)]\nmod tests {\n    #[test]\n    #[should_panic]\n    \
                    fn it_holds() {}\n}\n";
        assert_eq!(
            tests_in(text, "flow::table"),
            ["flow::table::tests::it_holds"]
        );
        let package = Package {
            name: "farlane-net".into(),
            folder: "backends/net".into(),
            tests: tests_in(text, "flow::table"),
        };
        let meant = [
            "it_holds",
            "flow::table",
            "net",
            "net/tests/tap",
            "farlane-n",
        ];
        assert!(meant.iter().all(|filter| package.is_meant(filter)));
        assert!(!package.is_meant("nosuch") && !package.is_meant("blk/src"));
    }

    /// An item's line without `pub` or `pub(...)`.
    fn without_visibility(line: &str) -> &str {
        let Some(rest) = line.strip_prefix("pub") else {
            return line;
        };
        match rest.strip_prefix('(') {
            Some(scope) => scope.split_once(") ").map_or(line, |(_, item)| item),
            None => rest.strip_prefix(' ').unwrap_or(line),
        }
    }

    #[test]
    fn a_module_is_found_whoever_may_see_it() {
        for line in [
            "mod a;",
            "pub mod a;",
            "pub(super) mod a;",
            "pub(in crate::b) mod a;",
        ] {
            assert_eq!(without_visibility(line), "mod a;");
        }
        assert_eq!(without_visibility("publish();"), "publish();");
    }

    /// The files of a program: its first one, and those of its modules.
    fn files_of(first: PathBuf) -> Vec<PathBuf> {
        // Modules of a file that is no folder's lie in a folder of its name.
        let mut files = vec![(first, true)];
        let mut at = 0;
        while let Some((file, is_of_folder)) = files.get(at).cloned() {
            at += 1;
            let folder = match is_of_folder || file.ends_with("mod.rs") {
                true => file.parent().unwrap().to_owned(),
                false => file.with_extension(""),
            };
            let mut path = None;
            for line in fs::read_to_string(&file).unwrap().lines() {
                let line = without_visibility(line.trim());
                if let Some(rest) = line.strip_prefix("#[path = \"") {
                    path = rest.strip_suffix("\"]").map(str::to_owned);
                } else if let Some(name) = line.strip_prefix("mod ")
                    && let Some(name) = name.strip_suffix(";")
                {
                    let there = match path.take() {
                        Some(path) => (file.parent().unwrap().join(path), true),
                        None => (folder.join(format!("{name}.rs")), false),
                    };
                    let found = match there.0.exists() {
                        true => there,
                        false => (folder.join(name).join("mod.rs"), true),
                    };
                    files.push(found);
                }
            }
        }
        files.into_iter().map(|(file, _)| file).collect()
    }

    #[test]
    fn what_is_not_built_as_a_test_program_has_no_tests() {
        let workspace = Workspace::find().unwrap();
        let command = workspace.cargo(&["metadata", "--no-deps", "--format-version", "1"]);
        let text = check_output("cargo metadata", command, METADATA_TIMEOUT).unwrap();
        let metadata: Value = serde_json::from_str(&text).unwrap();
        let (mut without, mut files) = (0, 0);
        for package in metadata["packages"].as_array().unwrap() {
            for target in package["targets"].as_array().unwrap() {
                let kind = target["kind"][0].as_str().unwrap();
                if target["test"] == true || !["bin", "lib"].contains(&kind) {
                    continue;
                }
                without += 1;
                for file in files_of(target["src_path"].as_str().unwrap().into()) {
                    files += 1;
                    let text = fs::read_to_string(&file).unwrap();
                    let has = ["#[test]", "#[cfg(test)]", "proptest!"];
                    let has = has.iter().find(|word| text.contains(*word));
                    assert_eq!(has, None, "{} is in no test", file.display());
                }
            }
        }
        assert!(without > 0 && files > 2 * without, "{without} {files}");
    }
}
