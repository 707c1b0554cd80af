//! The headers of the scripts, held against the code below them.

use super::{ACQUIRE, FENCE, ONE, RELEASE, RENEW, TTL, TWO, call, connect, ends, kinds, value};
use crate::support::{ask, server};

/// The comment lines that a script begins with, and the code behind them.
pub(super) fn halves(script: &str) -> (String, String) {
    let header = script.lines().take_while(|line| line.starts_with("--"));
    let code = script.lines().skip_while(|line| line.starts_with("--"));
    (
        header.collect::<Vec<_>>().join("\n"),
        code.collect::<Vec<_>>().join("\n"),
    )
}

/// What the header says under `title`, up to the next title.
#[track_caller]
fn section<'a>(header: &'a str, title: &str) -> &'a str {
    let start = format!("-- {title}: ");
    let from = header
        .find(&start)
        .unwrap_or_else(|| panic!("no {title}: {header}"));
    let text = &header[from + start.len()..];
    let titles = ["KEYS", "ARGV", "Returns"].map(|title| text.find(&format!("-- {title}: ")));
    &text[..titles.into_iter().flatten().min().unwrap_or(text.len())]
}

#[test]
fn headers_agree_with_the_code_below_them() {
    let server = server();
    let mut redis = connect(&server);
    for (name, script) in [("acquire", ACQUIRE), ("release", RELEASE), ("renew", RENEW)] {
        let (header, code) = halves(script);
        for title in ["Purpose", "KEYS", "ARGV", "Returns"] {
            assert!(!section(&header, title).is_empty(), "{name}: {title}");
        }
        let promised = section(&header, "Returns");
        for made in code.split("{ err = '").skip(1) {
            let word = made.split(' ').next().unwrap();
            assert!(word == "ERR" || promised.contains(word), "{name}: {word}");
        }

        // Called in the shape that the header draws, it answers in the shape that it promises.
        let (keys, args) = (section(&header, "KEYS"), section(&header, "ARGV"));
        let fixed_keys = keys.matches("[1] ").count();
        let fixed_args = args.matches("[1] ").count();
        let (_, each) = args.split_once("for each lock key: ").unwrap();
        let (words, standing) = each.split_once(':').unwrap_or((each, ""));
        for (stands, called) in [
            ("", "empty:"),
            ("-", "`-`:"),
            ("0", " 0:"),
            (TTL, "ttl in ms"),
        ] {
            let argument = |word: &str| match word.trim_start_matches("and ") {
                "lease id" => ONE,
                "ttl in ms" => TTL,
                "how it stands in line" if standing.contains(called) => stands,
                other => panic!("{name}: what is {other:?} ({called})?"),
            };
            let per_key: Vec<&str> = words.trim().split(", ").map(argument).collect();
            let names: Vec<String> = (0..7).map(|n| format!("{name}:{stands}:{n}")).collect();
            ask(&server, &["SET", &names[1], &value(TWO), "PX", TTL]);
            for n in [1, 2, 7] {
                let mut all_keys = vec![FENCE; fixed_keys];
                all_keys.extend(names[..n].iter().map(String::as_str));
                let mut all_args = vec!["host/1/0"; fixed_args];
                all_args.extend(per_key.repeat(n));
                let out = call(&mut redis, script, &all_keys, &all_args);
                assert_eq!(out.len(), n, "{name}");
                let said = if name == "acquire" {
                    kinds(&out)
                } else {
                    ends(&out)
                };
                assert!(!said.contains(&"refused"), "{name}: {out:?}");
            }
        }
    }
}
