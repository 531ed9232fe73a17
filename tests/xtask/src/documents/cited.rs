//! What a citation claims, and whether it is so.

use std::path::Path;

use clap::Parser as _;

use super::sources::Sources;
use crate::{Arguments, Task, scenarios};

/// Endings of file names that count as names of our files.
const ENDINGS: &[&str] = &[".rs", ".toml", ".md", ".c", ".h", ".sh"];

/// How names begin that specifications, the kernel and C libraries give.
const OTHERS: &[&str] = &[
    "CAP_",
    "RLIMIT_",
    "O_",
    "RWF_",
    "VFIO_",
    "VIRTIO_",
    "VHOST_USER_",
    "DEBUG_",
    "PROVE_",
    "IBV_",
    "ibv_",
    "iommu_platform",
    "virtio_id",
    "close_notify",
    "RETRY_EXC_ERR",
    "resourceN_wc",
    "_chk",
    "_iova2",
    "--memory-zone",
];

/// How paths begin that are not of the checkout: what builds and runs make, sysfs, a socket's
/// address, other projects'.
const ELSEWHERE: &[&str] = &[
    "target/",
    "devices/",
    "device/",
    "dm/",
    "node0/",
    "unix:",
    "hw/",
    "docs/interop/",
    "farlane/",
];

/// What is wrong with a citation in a document.
pub fn problems(sources: &Sources, document: &Path, code: &str) -> Vec<String> {
    let mut found = Vec::new();
    let words: Vec<&str> = code.split_whitespace().collect();
    if let ["cargo", rest @ ..] = &words[..] {
        found.extend(cargo(sources, rest));
        return found;
    }
    // Options of other programs are theirs.
    let is_others = words.len() > 1
        && !["--", "farlane-"]
            .iter()
            .any(|begin| code.starts_with(begin));
    for word in &words {
        if is_others && word.starts_with("--") {
            continue;
        }
        let word = word.trim_end_matches([',', '.', ':', ';', '…']);
        let word = word.trim_matches(['"', '\'']);
        if let Some(problem) = one(sources, document, word, words.len() == 1) {
            found.push(problem);
        }
    }
    found
}

/// What is wrong with one word; in a span of several, words in capitals and such that begin with
/// one are no names.
fn one(sources: &Sources, document: &Path, word: &str, is_alone: bool) -> Option<String> {
    if OTHERS.iter().any(|begin| word.starts_with(begin)) || stands_for_others(word) {
        return None;
    }
    if let Some(option) = word.strip_prefix("--") {
        let name = option.split(['=', '[']).next().unwrap_or(option);
        let is_name = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
        let is_there = sources.has_option(name);
        return (is_name && !is_there).then(|| format!("no option --{name}"));
    }
    if !word
        .chars()
        .all(|c| c.is_ascii_alphanumeric() || "_-./:!()".contains(c))
    {
        return None;
    }
    let word = word.trim_end_matches("()").trim_end_matches('!');
    if word.contains("::") {
        return path_of_names(sources, word);
    }
    if word.contains('/') {
        let is_ours = !word.starts_with('/')
            && !ELSEWHERE.iter().any(|begin| word.starts_with(begin))
            && !word.ends_with(".svg");
        return (is_ours && !sources.has_path(document, word)).then(|| "no such path".into());
    }
    if ENDINGS
        .iter()
        .any(|end| word.ends_with(end) && word.len() > end.len())
    {
        return (!sources.has_path(document, word)).then(|| "no such file".into());
    }
    if word.starts_with("farlane-") {
        let is_there = sources.has_package(word) || sources.has_path(document, word);
        return (!is_there).then(|| "neither a package nor a program".into());
    }
    let is_name = word.contains('_') && (is_alone || word.contains(char::is_lowercase))
        || is_alone && word.starts_with(char::is_uppercase) && word.contains(char::is_lowercase);
    let is_plain = word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    (is_name && is_plain && !is_known(sources, word)).then(|| "no such name in the code".into())
}

/// Whether a path or a name of a program has a part in capitals, that stands for what is to be
/// filled in.
fn stands_for_others(word: &str) -> bool {
    let is_placeholder =
        |part: &str| part.len() > 2 && part.chars().all(|c| c.is_ascii_uppercase() || c == '_');
    word.contains(['/', '-'])
        && !word.starts_with('-')
        && word.split(['/', '-', '.']).any(is_placeholder)
}

/// A word of the code; a counter, of which the code has the name without what all counters of a
/// daemon begin with; or a variant as it is written in JSON.
fn is_known(sources: &Sources, word: &str) -> bool {
    let parts: Vec<&str> = word.split('_').collect();
    let is_counter = ["farlane", "PREFIX", "gpu", "nvme", ""].contains(&parts[0])
        && (1..parts.len()).any(|from| sources.has_word(&parts[from..].join("_")));
    let variant: String = parts
        .iter()
        .flat_map(|part| {
            let mut letters = part.chars();
            let first = letters.next().map(|c| c.to_ascii_uppercase());
            first.into_iter().chain(letters)
        })
        .collect();
    sources.has_word(word) || is_counter || sources.has_word(&variant)
}

/// `a::b`: the first segment may be a crate of others.
fn path_of_names(sources: &Sources, word: &str) -> Option<String> {
    let parts: Vec<&str> = word.split("::").collect();
    let [.., owner, name] = parts[..] else {
        return None;
    };
    let is_others = ["std", "libc", "vhost", "vhost_user_backend", "rustix"].contains(&parts[0]);
    let is_there = is_others || sources.defines(owner, name) || {
        let path = parts.join("/").replace("farlane_", "");
        sources.has_path(Path::new(""), &path)
    };
    (!is_there).then(|| format!("{owner} defines no {name}"))
}

/// A command of cargo.
fn cargo(sources: &Sources, words: &[&str]) -> Vec<String> {
    // In a document, a word in capitals stands for others, and brackets for what can be left out.
    let is_word = |word: &&&str| !word.starts_with(['[', '…']) && **word != "...";
    let choice = words.iter().position(|word| *word == "|");
    let words = &words[..choice.unwrap_or(words.len())];
    let words: Vec<&str> = words.iter().filter(is_word).copied().collect();
    let Some(["xtask", rest @ ..]) = Some(&words[..]) else {
        let named = words
            .windows(2)
            .filter(|pair| matches!(pair[0], "-p" | "--package"));
        let unknown = named
            .map(|pair| pair[1])
            .filter(|name| name.starts_with("farlane") && !sources.has_package(name));
        return unknown.map(|name| format!("no package {name}")).collect();
    };
    if rest.is_empty() {
        return Vec::new();
    }
    // The first of what a placeholder stands for does.
    let filled = rest.iter().map(|word| match *word {
        "NAME" | "NAMES" | "NAME…" => "blk",
        word => word,
    });
    let filled: Vec<&str> = ["xtask"].into_iter().chain(filled).collect();
    match Arguments::try_parse_from(&filled) {
        Ok(Arguments {
            task: Task::Scenario { names, .. },
        }) => {
            let unknown = names.iter().filter(|name| scenarios::find(name).is_err());
            unknown.map(|name| format!("no scenario {name}")).collect()
        }
        Ok(_) => Vec::new(),
        Err(error) => {
            let text = error.to_string();
            // Without an argument that the text around speaks of.
            match error.kind() {
                clap::error::ErrorKind::MissingRequiredArgument => Vec::new(),
                _ => vec![text.lines().next().unwrap_or_default().to_owned()],
            }
        }
    }
}
