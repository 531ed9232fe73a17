//! The list of deliberate faults, `tests/xtask/faults.toml`.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

/// Where the list is, from the root of the checkout.
const LIST: &str = "tests/xtask/faults.toml";

/// A deliberate fault in the product.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// What it is called on the command line and in the table.
    pub name: String,
    /// What a user would suffer from it.
    pub about: String,
    /// The source file, from the root of the checkout.
    pub file: String,
    /// Text that is in the file once.
    pub find: String,
    /// What it is replaced with.
    pub replace: String,
    /// What must fail.
    pub test: Check,
    /// Text that must be in the output of what fails: it fails for that reason, and no other.
    pub because: Option<String>,
    /// Whether building and running it takes seconds.
    #[serde(default)]
    pub small: bool,
}

/// What must fail with a fault, and passes without.
#[derive(Debug, Clone, Deserialize, PartialEq, Eq)]
#[serde(untagged, deny_unknown_fields)]
pub enum Check {
    /// A test.
    Test {
        /// The package that has it.
        package: String,
        /// `lib`, or the name of a file in the package's `tests` folder.
        target: String,
        /// Its name with its modules, as the test program lists it.
        name: String,
    },
    /// A scenario.
    Scenario {
        /// Its name.
        scenario: String,
    },
}

impl Check {
    /// How the table calls it.
    pub fn describe(&self) -> String {
        match self {
            Self::Test {
                package,
                target,
                name,
            } => {
                let package = package.trim_start_matches("farlane-");
                match target.as_str() {
                    "lib" => format!("{package}: {name}"),
                    target => format!("{package}/{target}: {name}"),
                }
            }
            Self::Scenario { scenario } => format!("scenario {scenario}"),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    fault: Vec<Fault>,
}

/// Reads the list.
///
/// # Errors
/// When it cannot be read, or two faults have one name.
pub fn all(root: &Path) -> Result<Vec<Fault>> {
    let text =
        fs::read_to_string(root.join(LIST)).with_context(|| format!("Cannot read {LIST}"))?;
    let List { fault: faults } =
        toml::from_str(&text).with_context(|| format!("Cannot understand {LIST}"))?;
    for (at, fault) in faults.iter().enumerate() {
        ensure!(
            faults[..at].iter().all(|other| other.name != fault.name),
            "{LIST} has two faults {}",
            fault.name
        );
        ensure!(
            fault.because.is_some() || matches!(fault.test, Check::Test { .. }),
            "{LIST} does not say because of what the scenario of {} must fail",
            fault.name
        );
    }
    Ok(faults)
}

impl Fault {
    /// The text of its file with the fault in it.
    ///
    /// # Errors
    /// When the text to replace is not in the file, or more than once: the product has changed, and
    /// the list must follow.
    pub fn put_into(&self, text: &str) -> Result<String> {
        let Self {
            name, file, find, ..
        } = self;
        let times = text.matches(find).count();
        ensure!(
            times == 1,
            "The fault {name} is stale: {file} has its text {times} times, not once"
        );
        ensure!(*find != self.replace, "The fault {name} changes nothing");
        Ok(text.replacen(find, &self.replace, 1))
    }

    /// Puts it into its file.
    ///
    /// # Errors
    /// When the file cannot be read or written, or [`Fault::put_into`] fails.
    pub fn apply(&self, root: &Path) -> Result<()> {
        let path = root.join(&self.file);
        let text =
            fs::read_to_string(&path).with_context(|| format!("Cannot read {}", path.display()))?;
        fs::write(&path, self.put_into(&text)?)
            .with_context(|| format!("Cannot write {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenarios;
    use farlane_kit::workspace::Workspace;

    #[test]
    fn every_fault_is_found_in_its_file_and_its_scenario_in_the_list() {
        let workspace = Workspace::find().unwrap();
        let faults = all(workspace.root()).unwrap();
        assert!(faults.len() >= 20, "{} faults", faults.len());
        assert!(faults.iter().filter(|fault| fault.small).count() >= 5);
        let mut stale = Vec::new();
        for fault in faults {
            let text = fs::read_to_string(workspace.root().join(&fault.file));
            if let Err(error) = text
                .map_err(anyhow::Error::from)
                .and_then(|text| fault.put_into(&text))
            {
                stale.push(format!("{}: {error:#}", fault.name));
            }
            if let Check::Scenario { scenario } = &fault.test {
                let found = scenarios::ALL.iter().find(|one| one.name == scenario);
                assert!(found.is_some_and(|one| one.is_test), "{}", fault.name);
            }
        }
        assert!(stale.is_empty(), "{stale:#?}");
    }

    /// The row of a fault in the table of docs/testing.md.
    fn row(fault: &Fault) -> String {
        let in_ci = if fault.small { " (in CI)" } else { "" };
        let turned_red = match &fault.test {
            Check::Scenario { scenario } => format!("scenario {scenario}"),
            Check::Test {
                package,
                target,
                name,
            } => {
                let package = package.trim_start_matches("farlane-");
                format!("{package}, {target}: `{name}`")
            }
        };
        format!("| {}{in_ci} | {} | {turned_red} |", fault.name, fault.about)
    }

    #[test]
    fn the_page_about_tests_has_a_row_for_each_fault_and_no_other() {
        let root = Workspace::find().unwrap().root().to_owned();
        let page = fs::read_to_string(root.join("docs/testing.md")).unwrap();
        let (_, section) = page.split_once("\n## Mutations\n").unwrap();
        let section = section.split("\n## ").next().unwrap();
        // The first two are its head.
        let rows = section.lines().filter(|line| line.starts_with('|')).skip(2);
        let rows: Vec<_> = rows.map(str::to_owned).collect();
        let expected: Vec<_> = all(&root).unwrap().iter().map(row).collect();
        let missing: Vec<_> = expected.iter().filter(|row| !rows.contains(row)).collect();
        let stale: Vec<_> = rows.iter().filter(|row| !expected.contains(row)).collect();
        assert!(missing.is_empty(), "Rows that are missing: {missing:#?}");
        assert!(stale.is_empty(), "Rows of no fault: {stale:#?}");
        assert_eq!(rows.len(), expected.len(), "A row is there twice");
    }

    #[test]
    fn a_fault_whose_text_is_not_there_once_is_stale() {
        let fault: Fault = toml::from_str(
            r#"
            name = "n"
            about = "a"
            file = "f"
            find = "a"
            replace = "b"
            test = { scenario = "blk" }
            "#,
        )
        .unwrap();
        assert_eq!(fault.put_into("xax").unwrap(), "xbx");
        assert!(fault.put_into("xx").is_err());
        assert!(fault.put_into("aa").is_err());
    }
}
