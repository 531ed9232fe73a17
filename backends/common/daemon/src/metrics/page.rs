//! The page that shows the metrics to people: plots of what devices do, in a browser.
//!
//! It is three files that are served as they are, beside the metrics that it reads. Nothing of it
//! comes from elsewhere, and nothing else is run there, which [`POLICY`] has browsers see to.

use super::measures::{ASIDE, DEVICES, MEASURES};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// What the page may load, run and be shown in (Content Security Policy Level 3).
pub(super) const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
     connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A file of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum File {
    /// The document.
    Html,
    /// How it looks.
    Css,
    /// What it does.
    Js,
}

impl File {
    /// The file at a path of a request.
    pub fn at(path: &str) -> Option<Self> {
        match path {
            "/" => Some(Self::Html),
            "/page.css" => Some(Self::Css),
            "/page.js" => Some(Self::Js),
            _ => None,
        }
    }

    /// Its media type.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Html => "text/html; charset=utf-8",
            Self::Css => "text/css; charset=utf-8",
            Self::Js => "text/javascript; charset=utf-8",
        }
    }

    pub fn text(self) -> Cow<'static, str> {
        match self {
            Self::Html => include_str!("page/page.html").into(),
            Self::Css => include_str!("page/page.css").into(),
            Self::Js => script().into(),
        }
    }
}

/// The script, behind the tables that `farlane` has, too.
fn script() -> String {
    let measures: BTreeMap<_, _> = MEASURES.iter().copied().collect();
    format!(
        "'use strict';\nconst MEASURES = {};\nconst DEVICES = {};\nconst ASIDE = {};\n{}",
        serde_json::json!(measures),
        serde_json::json!(DEVICES),
        serde_json::json!(ASIDE),
        include_str!("page/page.js")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_the_page_is_from_elsewhere_or_makes_markup_of_names() {
        let files = [File::Html, File::Css, File::Js].map(|file| (file, file.text()));
        for (file, text) in &files {
            let text = text.replace("http://www.w3.org/2000/svg", "");
            for word in [
                "http:",
                "https:",
                "//cdn",
                "url(",
                "@import",
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "new Function",
                " style=",
                "<script>",
                "onload=",
            ] {
                assert!(!text.contains(word), "{file:?} has {word}");
            }
        }
        let [(_, html), ..] = &files;
        for name in ["page.css", "page.js"] {
            assert!(html.contains(&format!("=\"{name}\"")), "{name}");
            assert!(File::at(&format!("/{name}")).is_some());
        }
    }

    #[test]
    fn the_script_has_the_measures_of_farlane_top() {
        let script = script();
        let mut lines = script.lines();
        // Elsewhere it would mean nothing (ECMA-262, 11.2.1).
        assert_eq!(lines.next(), Some("'use strict';"));
        let mut table = |name| -> serde_json::Value {
            let line = lines.next().unwrap();
            let line = line.strip_prefix(&format!("const {name} = ")).unwrap();
            serde_json::from_str(line.strip_suffix(';').unwrap()).unwrap()
        };
        let measures = table("MEASURES");
        assert_eq!(measures.as_object().unwrap().len(), MEASURES.len());
        assert_eq!(measures["farlane_blk_bytes_read"], "bytes");
        assert_eq!(measures["farlane_net_locality_all_bytes"], "all-bytes");
        assert_eq!(measures["farlane_blk_kicks"], serde_json::Value::Null);
        assert_eq!(table("DEVICES"), serde_json::json!(DEVICES));
        assert_eq!(table("ASIDE"), serde_json::json!(ASIDE));
        // Names that it asks for are names of these.
        for word in [
            "bytes",
            "requests",
            "connected",
            "leases",
            "failovers",
            "local-bytes",
        ] {
            assert!(
                measures.as_object().unwrap().values().any(|of| of == word),
                "{word}"
            );
            assert!(script.contains(&format!("'{word}'")), "{word}");
        }
    }
}
