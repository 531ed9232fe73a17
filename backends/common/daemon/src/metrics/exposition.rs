//! Reading what a daemon tells: text of the exposition format (OpenMetrics 1.0.0), a sample a line.
//!
//! Lines that are none are left out: whoever tells them may be anybody.

/// One sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleLine<'a> {
    /// Its name, as in `farlane_blk_reads_total`.
    pub name: &'a str,
    /// Names and values, in their order.
    pub labels: Vec<(&'a str, String)>,
    /// A number, as it stands there.
    pub value: &'a str,
}

impl SampleLine<'_> {
    /// The name of its family, where it is a counter's: it is without `_total`.
    #[must_use]
    pub fn family(&self) -> &str {
        self.name.strip_suffix("_total").unwrap_or(self.name)
    }

    /// The value of a label.
    #[must_use]
    pub fn label(&self, name: &str) -> Option<&str> {
        let found = self.labels.iter().find(|(label, _)| *label == name);
        found.map(|(_, value)| value.as_str())
    }

    /// The value, where it is a whole number that is not negative. Counters of other programs may
    /// have a fraction.
    #[must_use]
    pub fn integer(&self) -> Option<u64> {
        self.value.parse().ok()
    }

    /// The value.
    #[must_use]
    pub fn number(&self) -> Option<f64> {
        self.value.parse().ok()
    }
}

/// The samples of a document.
pub fn samples(text: &str) -> impl Iterator<Item = SampleLine<'_>> {
    text.lines().filter_map(sample)
}

/// `name{label="value",...} 7`. A time and an exemplar may come behind.
fn sample(line: &str) -> Option<SampleLine<'_>> {
    let end = line.find(|c: char| !is_of_name(c)).unwrap_or(line.len());
    let (name, rest) = line.split_at(end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (Vec::new(), rest),
    };
    let value = rest.strip_prefix(' ')?.split(' ').next()?;
    (!name.is_empty()).then_some(SampleLine {
        name,
        labels,
        value,
    })
}

/// Characters of names of samples (OpenMetrics 1.0.0, "metricname").
fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == ':'
}

/// `a="b",c="d"}`, and what comes behind. In values a backslash stands before quotes and
/// backslashes, and `\n` for a line's end.
fn labels(text: &str) -> Option<(Vec<(&str, String)>, &str)> {
    let mut labels = Vec::new();
    let mut rest = text;
    loop {
        if let Some(rest) = rest.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, after) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut characters = after.char_indices();
        let end = loop {
            match characters.next()? {
                (at, '"') => break at,
                (_, '\\') => value.push(match characters.next()?.1 {
                    'n' => '\n',
                    character => character,
                }),
                (_, character) => value.push(character),
            }
        };
        name.chars().all(is_of_name).then_some(())?;
        labels.push((name, value));
        let after = after.get(end + 1..)?;
        rest = after.strip_prefix(',').unwrap_or(after);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Metrics, Sample};
    use super::*;

    #[test]
    fn what_daemons_tell_is_read() {
        let any = "\" } \\n \\ \n x=\"y\",";
        let mut metrics = Metrics::default();
        let reads = Sample::counter("reads", "Reads.", u64::MAX);
        metrics.add("farlane", &[("disk", any), ("node", "1")], [reads]);
        metrics.add("farlane", &[], [Sample::gauge("links", "Links.", 3)]);
        let text = metrics.open_metrics();
        let found: Vec<_> = samples(&text).collect();
        let [links, reads] = &found[..] else {
            panic!("{found:?}");
        };
        assert_eq!(
            (links.family(), links.integer()),
            ("farlane_links", Some(3))
        );
        assert_eq!(reads.family(), "farlane_reads");
        assert_eq!(reads.label("disk"), Some(any));
        assert_eq!(reads.label("node"), Some("1"));
        assert_eq!(reads.integer(), Some(u64::MAX));
    }

    #[test]
    fn times_and_exemplars_are_no_values() {
        let line = "a_bucket{le=\"0.5\"} 7 1700000000.5 # {trace=\"}\"} 0.4";
        let found = sample(line).unwrap();
        assert_eq!((found.name, found.integer()), ("a_bucket", Some(7)));
        assert_eq!(found.label("le"), Some("0.5"));
        let found = sample("up 0.5").unwrap();
        assert_eq!((found.integer(), found.number()), (None, Some(0.5)));
    }

    #[test]
    fn lines_that_are_no_samples_are_left_out() {
        for line in [
            "",
            "# TYPE a counter",
            "a",
            "a{",
            "a{b}",
            "a{b=\"c\" 1",
            "a{b=\"c} 1",
            "a{b=\"c\\",
            "a{b c=\"d\"} 1",
            " 1",
            "{a=\"b\"} 1",
            "\u{1b}[2J 1",
        ] {
            assert_eq!(sample(line), None, "{line}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read(text in "[a-z_{}\"=,\\\\ 0-9\n\u{1b}é]{0,80}") {
            for text in [format!("a{{{text}}} 1"), text] {
                let found = samples(&text).count();
                proptest::prop_assert!(found <= text.lines().count());
            }
        }

        #[test]
        fn any_labels_come_back(values in proptest::collection::vec(".{0,20}", 0..4)) {
            let names = ["a", "b", "c"];
            let labels: Vec<_> = names.into_iter().zip(values.iter().map(String::as_str)).collect();
            let mut metrics = Metrics::default();
            metrics.add("x", &labels, [Sample::counter("y", "Help.", 1)]);
            let text = metrics.open_metrics();
            let found: Vec<_> = samples(&text).collect();
            // A carriage return before the end of a line belongs to that, and to no value.
            let told: Vec<_> = found.iter().flat_map(|s| &s.labels).collect();
            let told: Vec<_> = told.iter().map(|(name, value)| (*name, value.as_str())).collect();
            proptest::prop_assert_eq!(told, labels);
        }
    }
}
