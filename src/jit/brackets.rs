//! Search for unbalanced brackets and unterminated comments in C++ code.

/// Returns the line (from 1) of the first error, and its description.
pub fn unbalanced(text: &str) -> Option<(usize, &'static str)> {
    const OPEN: [(u8, u8, &str, &str); 3] = [
        (b'{', b'}', "a { that nothing closes", "a } that closes nothing"),
        (b'(', b')', "a ( that nothing closes", "a ) that closes nothing"),
        (b'[', b']', "a [ that nothing closes", "a ] that closes nothing"),
    ];
    let (text, mut line, mut at) = (text.as_bytes(), 1, 0);
    let mut depths = [0usize; OPEN.len()];
    let mut outermost = [0; OPEN.len()]; // line of the outermost open bracket
    while let Some(&byte) = text.get(at) {
        let rest = &text[at..];
        let quoted = match byte {
            b'/' if rest.starts_with(b"//") => rest.iter().position(|&byte| byte == b'\n').or(Some(rest.len())),
            b'/' if rest.starts_with(b"/*") => Some(match find(&rest[2..], b"*/") {
                Some(end) => 2 + end + 2,
                None => return Some((line, "a comment that does not end")),
            }),
            b'"' if at > 0 && text[at - 1] == b'R' => raw_string(rest),
            // The quote in 1'000 does not begin a character literal.
            b'"' | b'\'' if byte == b'"' || at == 0 || !text[at - 1].is_ascii_alphanumeric() => literal(rest),
            _ => None,
        };
        if let Some(bytes) = quoted {
            line += rest[..bytes].iter().filter(|&&byte| byte == b'\n').count();
            at += bytes;
            continue;
        }
        line += usize::from(byte == b'\n');
        for (kind, &(open, close, _, too_many)) in OPEN.iter().enumerate() {
            if byte == open {
                if depths[kind] == 0 {
                    outermost[kind] = line;
                }
                depths[kind] += 1;
            } else if byte == close {
                let Some(depth) = depths[kind].checked_sub(1) else { return Some((line, too_many)) };
                depths[kind] = depth;
            }
        }
        at += 1;
    }
    (0..OPEN.len()).find(|&kind| depths[kind] > 0).map(|kind| (outermost[kind], OPEN[kind].2))
}

fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    text.windows(what.len()).position(|part| part == what)
}

/// Returns the bytes of the string or character literal at the beginning. An unterminated literal ends with its line.
fn literal(text: &[u8]) -> Option<usize> {
    let mut at = 1;
    while let Some(&byte) = text.get(at) {
        match byte {
            b'\\' => at += 1,
            b'\n' => return Some(at),
            _ if byte == text[0] => return Some(at + 1),
            _ => {}
        }
        at += 1;
    }
    Some(text.len())
}

/// Returns the bytes of the raw string `"x(...)x"` at the beginning, after its R.
fn raw_string(text: &[u8]) -> Option<usize> {
    let delimiter = &text[1..][..text[1..].iter().position(|&byte| byte == b'(')?];
    let ends = |at: &usize| {
        let rest = text[at + 1..].strip_prefix(delimiter);
        text[*at] == b')' && rest.is_some_and(|rest| rest.first() == Some(&b'"'))
    };
    (2 + delimiter.len()..text.len()).find(ends).map(|end| end + delimiter.len() + 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bracket_that_is_wrong_is_found_with_its_line() {
        for (text, expected) in [
            ("", None),
            ("if (x[0]) { y = f({1}); }", None),
            ("z = x; }", Some((1, "a } that closes nothing"))),
            ("{\n z = (x;\n}", Some((2, "a ( that nothing closes"))),
            ("if (x) {\n{ y; }\n", Some((1, "a { that nothing closes"))),
            ("\n\n]", Some((3, "a ] that closes nothing"))),
            ("z = x; // }\n/* {\n( */ y;", None),
            ("f(\"}\\\"}\", '}', '\\'', 1'000);\n}", Some((2, "a } that closes nothing"))),
            ("f(R\"a()\"})a\")", None),
            ("x; /* \n", Some((1, "a comment that does not end"))),
            ("c = '", None),
            ("s = \"(\n; (", Some((2, "a ( that nothing closes"))),
            ("R\"", None),
        ] {
            assert_eq!(unbalanced(text), expected, "{text}");
        }
    }
}
