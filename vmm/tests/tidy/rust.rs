//! Facts read off Rust source text without compiling it.

use std::str::FromStr;

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

/// Contents of one source file, as far as the rules care. Lines count from 1.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Functions outside test modules: name, line, lines of code in the body (neither blank nor comment).
    pub(crate) functions: Vec<(String, usize, usize)>,
    /// Functions outside test modules with a parameter that is a tuple: name and line.
    pub(crate) tuple_parameters: Vec<(String, usize)>,
    /// Lines outside test modules.
    pub(crate) production_lines: usize,
    /// Test modules in files of their own.
    pub(crate) test_files: Vec<String>,
    /// Whether the file opens with `#![expect(unsafe_code, …)]`.
    pub(crate) is_unsafe_module: bool,
    /// Lines outside test modules with the keyword `unsafe`.
    pub(crate) unsafe_lines: Vec<usize>,
    /// Lines that ask for the target's architecture.
    pub(crate) target_arch_lines: Vec<usize>,
    /// Lines with an attribute `#[ignore]`.
    pub(crate) ignored_lines: Vec<usize>,
    /// Lines that sleep, and whether they are in a test module.
    pub(crate) sleeps: Vec<(usize, bool)>,
    /// Literals outside test modules as they are written, doc comments left out.
    pub(crate) literals: Vec<String>,
}

/// The facts of a file with the content `text`, or why it is not Rust.
pub(crate) fn facts(text: &str) -> Result<Facts, String> {
    let tokens = TokenStream::from_str(text).map_err(|error| error.to_string())?;
    let lines: Vec<&str> = text.lines().collect();
    let mut facts = Facts { production_lines: lines.len(), ..Facts::default() };
    Scan { lines: &lines, facts: &mut facts }.stream(tokens, false);
    Ok(facts)
}

struct Scan<'a> {
    lines: &'a [&'a str],
    facts: &'a mut Facts,
}

impl Scan<'_> {
    fn stream(&mut self, tokens: TokenStream, in_test: bool) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut rest = tokens.as_slice();
        while let Some((token, mut after)) = rest.split_first() {
            let line = token.span().start().line;
            match token {
                TokenTree::Ident(word) => self.word(&word.to_string(), line, after, in_test),
                TokenTree::Punct(hash) if hash.as_char() == '#' => {
                    after = self.attribute(line, after, in_test);
                }
                TokenTree::Group(group) => self.stream(group.stream(), in_test),
                TokenTree::Literal(literal) if !in_test => self.facts.literals.push(literal.to_string()),
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
            rest = after;
        }
    }

    fn word(&mut self, word: &str, line: usize, after: &[TokenTree], in_test: bool) {
        match (word, after) {
            ("unsafe", _) if !in_test => self.facts.unsafe_lines.push(line),
            ("target_arch", _) => self.facts.target_arch_lines.push(line),
            ("sleep", [TokenTree::Group(call), ..]) if call.delimiter() == Delimiter::Parenthesis => {
                self.facts.sleeps.push((line, in_test));
            }
            ("fn", [TokenTree::Ident(name), signature @ ..]) if !in_test => {
                if parameters(signature).iter().any(|parameter| is_tuple(parameter)) {
                    self.facts.tuple_parameters.push((name.to_string(), line));
                }
                if let Some(body) = body(signature) {
                    let length = self.code_lines(body);
                    self.facts.functions.push((name.to_string(), line, length));
                }
            }
            _ => {}
        }
    }

    /// Reads the attribute after a `#`, and the whole module when it is one of tests; returns what follows.
    fn attribute<'t>(&mut self, line: usize, after: &'t [TokenTree], in_test: bool) -> &'t [TokenTree] {
        let (inner, group, after) = match after {
            [TokenTree::Punct(bang), TokenTree::Group(group), after @ ..] if bang.as_char() == '!' => {
                (true, group, after)
            }
            [TokenTree::Group(group), after @ ..] => (false, group, after),
            _ => return after,
        };
        let text: String = group.stream().to_string().split_whitespace().collect();
        self.facts.is_unsafe_module |= inner && text.starts_with("expect(unsafe_code");
        if text == "ignore" || text.starts_with("ignore=") {
            self.facts.ignored_lines.push(line);
        }
        if !text.starts_with("doc=") {
            self.stream(group.stream(), in_test);
        }
        let is_test = text == "cfg(test)" || text.starts_with("cfg(all(test,");
        if inner || !is_test { after } else { self.test_module(line, after) }
    }

    /// What follows `#[cfg(test)]` on `line`: passes over a module, leaves anything else.
    fn test_module<'t>(&mut self, line: usize, after: &'t [TokenTree]) -> &'t [TokenTree] {
        let is_mod = |token: &TokenTree| matches!(token, TokenTree::Ident(word) if word == "mod");
        // Between the attribute and `mod` there is at most `pub(crate)`.
        let Some(at) = after.iter().take(3).position(is_mod) else { return after };
        match after.get(at + 1..) {
            Some([TokenTree::Ident(name), TokenTree::Punct(_), rest @ ..]) => {
                self.facts.test_files.push(name.to_string());
                rest
            }
            Some([TokenTree::Ident(_), TokenTree::Group(module), rest @ ..]) => {
                let lines = module.span_close().end().line - line + 1;
                self.facts.production_lines = self.facts.production_lines.saturating_sub(lines);
                self.stream(module.stream(), true);
                rest
            }
            _ => after,
        }
    }

    fn code_lines(&self, body: &Group) -> usize {
        let (open, close) = (body.span_open().start().line, body.span_close().start().line);
        let inside = self.lines.get(open..close.saturating_sub(1)).unwrap_or_default();
        inside
            .iter()
            .map(|line| line.trim())
            .filter(|line| !line.is_empty() && !line.starts_with("//"))
            .count()
    }
}

/// The braces that end a signature; `None` when a semicolon does.
fn body(signature: &[TokenTree]) -> Option<&Group> {
    signature.iter().find_map(|token| match token {
        TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => Some(Some(group)),
        TokenTree::Punct(end) if end.as_char() == ';' => Some(None),
        _ => None,
    })?
}

/// The parameters of a function, each as its tokens.
fn parameters(signature: &[TokenTree]) -> Vec<Vec<TokenTree>> {
    let list = outside_angles(signature).find_map(|(_, token)| match token {
        TokenTree::Group(list) if list.delimiter() == Delimiter::Parenthesis => Some(list.stream()),
        _ => None,
    });
    list.map_or_else(Vec::new, split)
}

/// Pieces of `tokens` between commas.
fn split(tokens: TokenStream) -> Vec<Vec<TokenTree>> {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let commas = outside_angles(&tokens).filter(|(_, token)| is_mark(token, ',')).map(|(at, _)| at);
    let mut ends: Vec<usize> = commas.collect();
    ends.push(tokens.len());
    let starts = std::iter::once(0).chain(ends.iter().map(|end| end + 1));
    let pieces = starts.zip(&ends).map(|(start, end)| tokens[start..*end].to_vec());
    pieces.filter(|piece| !piece.is_empty()).collect()
}

/// The `tokens` that are not in angle brackets, with their places. The `>` of an arrow is no bracket.
fn outside_angles(tokens: &[TokenTree]) -> impl Iterator<Item = (usize, &TokenTree)> {
    let (mut depth, mut last) = (0, ' ');
    tokens.iter().enumerate().filter(move |(_, token)| {
        let mark = if let TokenTree::Punct(punct) = token { punct.as_char() } else { ' ' };
        match mark {
            '<' => depth += 1,
            '>' if last != '-' => depth -= 1,
            _ => {}
        }
        last = mark;
        depth == 0
    })
}

/// Whether the pattern or the type of a parameter is a tuple, or a reference to one.
fn is_tuple(parameter: &[TokenTree]) -> bool {
    let colon = parameter.windows(2).position(|pair| is_mark(&pair[0], ':') && !is_mark(&pair[1], ':'));
    let (pattern, of_type) = parameter.split_at(colon.unwrap_or(parameter.len()));
    [pattern, of_type].into_iter().any(|tokens| {
        let is_group = |group: &Group| group.delimiter() == Delimiter::Parenthesis;
        matches!(without_reference(tokens), [TokenTree::Group(group)]
            if is_group(group) && split(group.stream()).len() > 1)
    })
}

/// `tokens` without the colon, references, lifetimes and `mut` in front.
fn without_reference(tokens: &[TokenTree]) -> &[TokenTree] {
    match tokens {
        [mark, after @ ..] if is_mark(mark, ':') || is_mark(mark, '&') => without_reference(after),
        [quote, _, after @ ..] if is_mark(quote, '\'') => without_reference(after),
        [TokenTree::Ident(word), after @ ..] if word == "mut" => without_reference(after),
        _ => tokens,
    }
}

pub(crate) fn is_mark(token: &TokenTree, mark: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == mark)
}
