//! Which kernel modules need which others, as depmod wrote it down.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

/// The modules of one kernel.
#[derive(Debug)]
pub struct Modules {
    /// By module name: its file and the files that it needs.
    files: BTreeMap<String, (String, Vec<String>)>,
    /// By module name: names of modules that should be there as well.
    wishes: BTreeMap<String, Vec<String>>,
    builtin: BTreeSet<String>,
}

impl Modules {
    /// Reads `modules.dep`, `modules.softdep` and `modules.builtin` of a kernel's module folder.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn read(folder: &Path) -> Result<Self> {
        let read = |name: &str| {
            let path = folder.join(name);
            fs::read_to_string(&path).with_context(|| format!("Cannot read {}", path.display()))
        };
        Ok(Self::parse(
            &read("modules.dep")?,
            &read("modules.softdep")?,
            &read("modules.builtin")?,
        ))
    }

    fn parse(dependencies: &str, wishes: &str, builtin: &str) -> Self {
        let mut modules = Self {
            files: BTreeMap::new(),
            wishes: BTreeMap::new(),
            builtin: builtin.lines().map(module_name).collect(),
        };
        for (file, needs) in dependencies.lines().filter_map(|line| line.split_once(':')) {
            let needs = needs.split_whitespace().map(str::to_owned).collect();
            modules
                .files
                .insert(module_name(file), (file.to_owned(), needs));
        }
        for line in wishes.lines() {
            let mut words = line.split_whitespace();
            if words.next() == Some("softdep")
                && let Some(module) = words.next()
            {
                let wished = words.filter(|word| !word.ends_with(':')).map(module_name);
                modules
                    .wishes
                    .entry(module_name(module))
                    .or_default()
                    .extend(wished);
            }
        }
        modules
    }

    /// Whether the kernel has a module, or has it built in.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.files.contains_key(name) || self.builtin.contains(name)
    }

    /// The files of modules and of everything that they need or wish for.
    ///
    /// # Errors
    /// When one of the named modules does not exist.
    pub fn with_dependencies(&self, names: &[&str]) -> Result<BTreeSet<String>> {
        for name in names {
            if !self.has(name) {
                bail!("The guests' kernel has no module {name}");
            }
        }
        let mut found = BTreeSet::new();
        let mut to_do: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        while let Some(name) = to_do.pop() {
            // A wish may name an alias or something built in: then there is no file.
            let Some((file, needs)) = self.files.get(&name) else {
                continue;
            };
            if found.insert(file.clone()) {
                to_do.extend(needs.iter().map(|need| module_name(need)));
                to_do.extend(self.wishes.get(&name).into_iter().flatten().cloned());
            }
        }
        Ok(found)
    }
    /// The files of modules and of everything that they need, each after what it needs.
    ///
    /// # Errors
    /// When one of the named modules does not exist.
    pub fn load_order(&self, names: &[&str]) -> Result<Vec<String>> {
        let mut order = Vec::new();
        for name in names {
            for file in self.needed(name)? {
                if !order.contains(&file) {
                    order.push(file);
                }
            }
        }
        Ok(order)
    }

    /// The file of a module behind those that it needs; none when it is built in.
    fn needed(&self, name: &str) -> Result<Vec<String>> {
        let Some((file, needs)) = self.files.get(name) else {
            if self.builtin.contains(name) {
                return Ok(Vec::new());
            }
            bail!("The guests' kernel has no module {name}");
        };
        // depmod lists all that is needed, what is needed first last.
        Ok(needs.iter().rev().chain([file]).cloned().collect())
    }
}

/// The name of a module from its file: `a/b-c.ko.xz` is `b_c`.
fn module_name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split(".ko").next().unwrap_or(name).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modules() -> Modules {
        Modules::parse(
            "k/a.ko.xz: k/b-x.ko.xz\nk/b-x.ko.xz:\nk/c.ko.xz: k/a.ko.xz\nk/d.ko.xz:\n",
            "# comment\nsoftdep b-x pre: d alias-of-something\n",
            "k/e.ko\n",
        )
    }

    #[test]
    fn needs_and_wishes_are_followed_to_their_end() {
        let files = modules().with_dependencies(&["c", "e"]).unwrap();
        assert_eq!(
            files.into_iter().collect::<Vec<_>>(),
            ["k/a.ko.xz", "k/b-x.ko.xz", "k/c.ko.xz", "k/d.ko.xz"]
        );
    }

    #[test]
    fn what_is_needed_is_loaded_before() {
        let modules = Modules::parse(
            "k/a.ko: k/b.ko k/c.ko\nk/b.ko: k/c.ko\nk/c.ko:\n",
            "",
            "k/d.ko\n",
        );
        let order = modules.load_order(&["d", "a", "b"]).unwrap();
        assert_eq!(order, ["k/c.ko", "k/b.ko", "k/a.ko"]);
        assert!(modules.load_order(&["z"]).is_err());
    }

    #[test]
    fn a_module_that_does_not_exist_is_an_error() {
        assert!(modules().with_dependencies(&["z"]).is_err());
    }
}
