//! What is printed.

use super::finding::{Finding, Level};
use serde::Serialize;

/// Counts up when a reader of an older document could misunderstand it.
const FORMAT: u32 = 1;

/// All findings, the worst first.
#[derive(Debug, Serialize)]
pub struct Document {
    /// Another number where a reader of older documents could misunderstand this one.
    pub format: u32,
    /// The findings.
    pub findings: Vec<Finding>,
}

impl Document {
    /// What these say. Those of a level stay in their order.
    #[must_use]
    pub fn new(mut findings: Vec<Finding>) -> Self {
        findings.sort_by_key(|finding| finding.level);
        Self {
            format: FORMAT,
            findings,
        }
    }

    /// Whether something does not work.
    #[must_use]
    pub fn has_problem(&self) -> bool {
        let mut levels = self.findings.iter().map(|finding| finding.level);
        levels.any(|level| level == Level::Problem)
    }

    /// A line each, and below it what to do.
    #[must_use]
    pub fn text(&self) -> String {
        let names = self.findings.iter().map(|finding| finding.name.as_str());
        let width = names.map(str::len).max().unwrap_or(0);
        let mut text = String::new();
        for finding in &self.findings {
            let (level, name) = (finding.level.as_str(), finding.name.as_str());
            text.push_str(&format!("{level:<7}  {name:<width$}  {}\n", finding.what));
            if let Some(remedy) = &finding.remedy {
                text.push_str(&format!("{:<7}  {:<width$}  {remedy}\n", "", ""));
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Name;

    #[test]
    fn problems_come_first_and_have_their_remedies_below() {
        let findings = vec![
            Finding::ok(Name::Bpf, "fine"),
            Finding::note(Name::Iommu, "none", "switch it on"),
            Finding::problem(Name::SocketStale, "nobody", "remove it"),
        ];
        let document = Document::new(findings);
        assert!(document.has_problem());
        let lines = [
            "problem  socket-stale  nobody",
            "                       remove it",
            "note     iommu         none",
            "                       switch it on",
            "ok       bpf           fine",
        ];
        assert_eq!(document.text(), lines.join("\n") + "\n");
        let json = serde_json::to_value(&document).unwrap();
        let expected = serde_json::json!({"format": 1, "findings": [
            {"name": "socket-stale", "level": "problem", "what": "nobody", "remedy": "remove it"},
            {"name": "iommu", "level": "note", "what": "none", "remedy": "switch it on"},
            {"name": "bpf", "level": "ok", "what": "fine", "remedy": null},
        ]});
        assert_eq!(json, expected);
        assert!(!Document::new(vec![Finding::note(Name::Bpf, "a", "b")]).has_problem());
    }
}
