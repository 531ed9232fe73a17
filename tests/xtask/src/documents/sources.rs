//! The names of the tree: its files, the words of its code, and what is defined where.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};

/// Folders without sources of ours.
const SKIPPED: &[&str] = &["target", "corpus", ".git"];
/// Endings of files whose words count.
const CODE: &[&str] = &["rs", "c", "h", "S", "toml", "json", "sh", "py"];
/// What a definition in Rust begins with.
const KEYWORDS: &[&str] = &[
    "fn",
    "struct",
    "enum",
    "trait",
    "type",
    "const",
    "static",
    "mod",
    "union",
    "macro_rules!",
];

/// What a line begins with that says of which type functions are.
const OWNERS: &[&str] = &["impl", "trait", "struct", "enum", "unsafe", "mod"];

/// What the tree has.
pub struct Sources {
    files: Vec<PathBuf>,
    /// Words of code, outside of comments.
    words: HashSet<String>,
    /// Every name that Rust code defines: the files that do.
    defined: BTreeMap<String, BTreeSet<usize>>,
    /// Of each file, the types that it defines or has an `impl` of.
    owners: Vec<HashSet<String>>,
    /// Literals that begin as options do.
    options: HashSet<String>,
    /// Packages of cargo's and Debian's, programs and systemd units.
    packages: BTreeSet<String>,
}

/// The words of a text, of the characters that are part of one.
pub fn words(text: &str, is_part: impl Fn(char) -> bool) -> HashSet<&str> {
    let words = text.split(move |c: char| !is_part(c));
    words.filter(|word| !word.is_empty()).collect()
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

impl Sources {
    pub fn read(root: &Path) -> Self {
        let mut sources = Self {
            files: Vec::new(),
            words: HashSet::new(),
            defined: BTreeMap::new(),
            owners: Vec::new(),
            options: HashSet::new(),
            packages: BTreeSet::new(),
        };
        sources.walk(root, Path::new(""));
        sources.files.sort();
        for at in 0..sources.files.len() {
            sources.learn(root, at);
        }
        sources
    }

    fn walk(&mut self, root: &Path, folder: &Path) {
        for entry in std::fs::read_dir(root.join(folder)).unwrap() {
            let entry = entry.unwrap();
            let path = folder.join(entry.file_name());
            let kind = entry.file_type().unwrap();
            if kind.is_file() {
                self.files.push(path);
            } else if kind.is_dir() && !SKIPPED.iter().any(|name| path.ends_with(name)) {
                self.walk(root, &path);
            }
        }
    }

    fn learn(&mut self, root: &Path, at: usize) {
        let path = &self.files[at];
        let end = path.extension().and_then(|end| end.to_str()).unwrap_or("");
        let own = path.starts_with("tests/xtask/src/documents");
        self.owners.push(HashSet::new());
        if path.ends_with("packaging/debian/control") {
            let text = super::read(&root.join(path));
            let names = text.lines().filter_map(|l| l.strip_prefix("Package: "));
            self.packages.extend(names.map(str::to_owned));
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if let Some(unit) = name.strip_prefix("farlane.farlane-") {
            self.packages.insert(format!("farlane-{unit}"));
        }
        if !CODE.contains(&end) || own {
            return;
        }
        let text = super::read(&root.join(path));
        if path.ends_with("Cargo.toml") {
            let names = text.lines().filter_map(|line| line.strip_prefix("name = "));
            self.packages
                .extend(names.map(|n| n.trim_matches('"').to_owned()));
        }
        let programs = path.parent().filter(|folder| folder.ends_with("src/bin"));
        if let (Some(_), Some(stem)) = (programs, path.file_stem()) {
            self.packages.insert(stem.display().to_string());
        }
        for line in text.lines() {
            let line = line.trim_start();
            if line.starts_with("//") || line.starts_with("* ") {
                continue;
            }
            let is_part = |c: char| is_word(c) || c == '-';
            let options = words(line, is_part).into_iter();
            let options = options.filter_map(|word| word.strip_prefix("--"));
            self.options.extend(options.map(str::to_owned));
            for word in words(line, is_word) {
                if !self.words.contains(word) {
                    self.words.insert(word.to_owned());
                }
            }
            let begin = line
                .trim_start_matches("pub(crate) ")
                .trim_start_matches("pub ");
            if begin
                .split([' ', '<'])
                .next()
                .is_some_and(|word| OWNERS.contains(&word))
            {
                self.owners[at].extend(words(line, is_word).into_iter().map(str::to_owned));
            }
            for name in definitions(line) {
                let files = self.defined.entry(name.to_owned()).or_default();
                files.insert(at);
            }
        }
    }

    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Whether there is a file or folder: seen from the top, from a document, or as the end of a
    /// path, also without the ending of a Rust file.
    pub fn has_path(&self, document: &Path, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        let rust = format!("{path}.rs");
        let beside = document.parent().map(|folder| folder.join(path));
        self.files.iter().any(|file| {
            beside
                .as_ref()
                .is_some_and(|beside| file.starts_with(beside))
                || file.starts_with(path)
                || file.ends_with(&rust)
                || file.ancestors().any(|part| part.ends_with(path))
        })
    }

    pub fn has_word(&self, word: &str) -> bool {
        self.words.contains(word)
    }

    /// Whether a program takes an option: a field or a literal is called so.
    pub fn has_option(&self, name: &str) -> bool {
        self.has_word(&name.replace('-', "_")) || self.options.contains(name)
    }

    /// Whether `name` is defined in a file or a type that is called `owner`.
    pub fn defines(&self, owner: &str, name: &str) -> bool {
        let Some(files) = self.defined.get(name) else {
            return false;
        };
        let package = owner.trim_start_matches("farlane_").replace('_', "-");
        // The tests of `data` may be in `data_tests.rs`.
        let is_called = |part: &str| {
            part == owner || part == package || owner == "tests" && part.ends_with("_tests")
        };
        files.iter().any(|&at| {
            let path = self.files[at].with_extension("");
            let mut parts = path.iter().filter_map(|part| part.to_str());
            parts.any(is_called) || self.owners[at].contains(owner)
        })
    }

    pub fn has_package(&self, name: &str) -> bool {
        self.packages.contains(name)
    }
}

/// Names that a line of Rust defines, variants of an enum among them.
fn definitions(line: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut before = "";
    for word in line.split_whitespace() {
        if KEYWORDS.contains(&before) {
            found.extend(word.split(|c| !is_word(c)).find(|name| !name.is_empty()));
        }
        before = word;
    }
    let name = line.split(|c| !is_word(c)).next().unwrap_or("");
    let rest = line[name.len()..].trim_start();
    if name.starts_with(char::is_uppercase) && rest.starts_with([',', '(', '{', '=']) {
        found.push(name);
    }
    found
}

#[test]
fn definitions_are_found() {
    assert_eq!(
        definitions("pub(crate) const fn stitch<T>(&self) {"),
        ["fn", "stitch"]
    );
    assert_eq!(definitions("Striped(u32),"), ["Striped"]);
    assert_eq!(definitions("pub struct View<'a> {"), ["View"]);
    assert!(definitions("let x = View { a };").is_empty());
}
