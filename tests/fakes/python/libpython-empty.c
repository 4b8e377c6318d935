/* A library with a name like Python's that has nothing of Python's. */
int of_no_interest(void);

int of_no_interest(void) {
    return 0;
}
