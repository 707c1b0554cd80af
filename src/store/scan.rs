//! A scan of the keys of a server, part by part.

/// The number of keys that Redis visits for one part. Redis serves other clients between two parts.
pub const KEYS_AT_A_TIME: u32 = 500;

/// The next part of a scan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scan {
    /// The text with which the keys begin.
    pub start: String,
    /// The cursor of `SCAN` for this part; 0 for the first part.
    pub cursor: u64,
}

/// A part of a scan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScannedKeys {
    /// The keys. A key may be in several parts.
    pub keys: Vec<String>,
    /// The cursor of `SCAN` for the next part; 0 after the last part.
    pub next: u64,
}

impl Scan {
    /// The pattern for `SCAN` that matches the keys.
    pub fn pattern(&self) -> String {
        let mut pattern = String::with_capacity(self.start.len() + 1);
        for c in self.start.chars() {
            if matches!(c, '*' | '?' | '[' | ']' | '\\' | '^' | '-') {
                pattern.push('\\');
            }
            pattern.push(c);
        }
        pattern + "*"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_characters_of_a_pattern_are_escaped() {
        let scan = Scan {
            start: r"a*b?[c-d]^\:é".to_owned(),
            cursor: 0,
        };
        assert_eq!(scan.pattern(), r"a\*b\?\[c\-d\]\^\\:é*");
    }
}
