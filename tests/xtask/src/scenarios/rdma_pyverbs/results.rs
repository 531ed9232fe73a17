//! What Python's `unittest` says of its tests, one after the other (`-v`).

use anyhow::{Context as _, Result, bail, ensure};

/// How a test has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    Passed,
    /// For this reason.
    Skipped(String),
    /// In the word of unittest: `FAIL`, `ERROR` and others.
    Failed(String),
}

/// A test, and how it has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Test {
    /// Module, class and function: `test_mr.MRTest.test_reg_mr`.
    pub name: String,
    pub ending: Ending,
}

impl Test {
    /// The module that it is in.
    pub fn module(&self) -> &str {
        self.name.split('.').next().unwrap_or_default()
    }
}

/// All tests of a run that has come to its end. What tests themselves print may stand between a
/// test's name and its ending.
pub fn parse(said: &str) -> Result<Vec<Test>> {
    let mut tests = Vec::new();
    let mut running = None;
    for line in said.lines() {
        if let Some(name) = begun(line)
            && let Some(before) = running.replace(name.to_owned())
        {
            bail!("unittest says nothing of the end of {before}");
        }
        let word = line.rsplit_once(" ... ").map_or(line, |(_, ending)| ending);
        if running.is_some()
            && let Some(ending) = ending(word)
        {
            tests.extend(running.take().map(|name| Test { name, ending }));
        }
    }
    if let Some(name) = running {
        bail!("The tests did not come to the end of {name}");
    }
    let ran = said.lines().find_map(|line| {
        let count = line.strip_prefix("Ran ")?.split(' ').next()?;
        count.parse::<usize>().ok()
    });
    let ran = ran.context("unittest says nothing of how many tests there were")?;
    ensure!(
        ran == tests.len(),
        "unittest ran {ran} tests, and said how {} of them ended",
        tests.len()
    );
    Ok(tests)
}

/// The name of the test that begins in a line: `test_reg_mr (tests.test_mr.MRTest.test_reg_mr)`.
fn begun(line: &str) -> Option<&str> {
    let (function, rest) = line.split_once(" (tests.")?;
    let (name, _) = rest.split_once(')')?;
    let is_function = !function.is_empty() && !function.contains(' ');
    (is_function && name.ends_with(function)).then_some(name)
}

fn ending(word: &str) -> Option<Ending> {
    if let Some(reason) = word.strip_prefix("skipped ") {
        // As Python writes a string.
        let mut letters = reason.chars();
        let (first, last) = (letters.next()?, letters.next_back()?);
        let is_quoted = first == last && matches!(first, '\'' | '"');
        return is_quoted.then(|| Ending::Skipped(letters.as_str().into()));
    }
    match word {
        "ok" => Some(Ending::Passed),
        "FAIL" | "ERROR" | "expected failure" | "unexpected success" => {
            Some(Ending::Failed(word.into()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "\
test_mr (tests.test_mr.MRTest.test_mr)
Registers memory ... ok
test_fork (tests.test_fork.ForkAPITest.test_fork) ... is_fork_initialized() = 2
ok
test_dm (tests.test_device.DMTest.test_dm) ... skipped 'Device memory is not supported'
test_cm (tests.test_rdmacm.CMTest.test_cm) ... skipped \"Device a0 doesn't have net interface\"
test_cq (tests.test_cq.CQTest.test_cq) ... FAIL

======================================================================
FAIL: test_cq (tests.test_cq.CQTest.test_cq)
----------------------------------------------------------------------
Ran 5 tests in 0.1s

FAILED (failures=1, skipped=2)
";

    #[test]
    fn each_test_ends_in_one_way() {
        let endings: Vec<_> = parse(SAID).unwrap().into_iter().collect();
        let names: Vec<_> = endings.iter().map(|test| test.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "test_mr.MRTest.test_mr",
                "test_fork.ForkAPITest.test_fork",
                "test_device.DMTest.test_dm",
                "test_rdmacm.CMTest.test_cm",
                "test_cq.CQTest.test_cq"
            ]
        );
        assert_eq!(endings[0].module(), "test_mr");
        let endings: Vec<_> = endings.into_iter().map(|test| test.ending).collect();
        let skipped = |reason: &str| Ending::Skipped(reason.into());
        assert_eq!(
            endings,
            [
                Ending::Passed,
                Ending::Passed,
                skipped("Device memory is not supported"),
                skipped("Device a0 doesn't have net interface"),
                Ending::Failed("FAIL".into())
            ]
        );
    }

    #[test]
    fn a_run_that_breaks_off_is_none() {
        let (before, _) = SAID.split_once("is_fork").unwrap();
        assert!(parse(before).is_err());
        let (before, _) = SAID.split_once("======").unwrap();
        assert!(parse(before).is_err());
        assert!(parse(&SAID.replace("Ran 5", "Ran 6")).is_err());
    }
}
